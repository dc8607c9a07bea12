#!/usr/bin/env bash
# `make test-telemetry`: tests/telemetry with the Python given as $1 (default .venv/bin/python); further arguments go to
# pytest. Installs Prometheus (Debian, as root) where there is none; exit status 77 where that cannot be.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${1:-$root/.venv/bin/python}
shift || true
case $python in /*) ;; *) python=$PWD/$python ;; esac
if ! command -v prometheus >/dev/null || ! command -v promtool >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "test-telemetry cannot run here: no prometheus and promtool, and they can only be installed on Debian by root" >&2
        exit 77
    fi
    # Debian starts a server of its own with the package unless a policy says no. Images of containers have that policy.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        trap 'rm -f "$policy"' EXIT
    fi
    if ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends prometheus; } >/dev/null; then
        echo "test-telemetry cannot run here: Debian's prometheus could not be installed" >&2
        exit 77
    fi
fi
cd "$root"
[ $# -gt 0 ] || set -- tests/telemetry
OMP_NUM_THREADS=1 "$python" -m pytest -p no:cacheprovider --durations=3 "$@"
