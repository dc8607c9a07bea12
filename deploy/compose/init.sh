#!/bin/sh
# The secrets of a new mesh and the owners of its volumes. What is there stays; runs again at every `up`.
set -eu
umask 077
cd /volumes

secret() { # FILE: 64 hexadecimal digits, if it does not exist; whole or not at all
    [ -s "$1" ] && return
    head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$1.new"
    mv "$1.new" "$1"
}

secret mesh-secret/token
if [ ! -s redis-secret/redis.conf ]; then
    secret redis-secret/password
    printf 'requirepass %s\nprotected-mode no\n' "$(cat redis-secret/password)" >redis-secret/redis.conf.new
    mv redis-secret/redis.conf.new redis-secret/redis.conf
fi
# This root may neither read nor write what it has given away: x tells it next time that the files are there.
chmod 711 mesh-secret redis-secret redis-data journal 2>/dev/null || true
chown 10001:10001 mesh-secret/token redis-secret/password redis-secret/redis.conf
chown 10001:10001 mesh-secret redis-secret redis-data journal
