#!/usr/bin/env bash
# ahead.sh PYTHON COMMAND [ARGUMENT…]: runs the command, and beside it builds the images that `make test-compose` needs,
# with the processor time that the command leaves over. Its exit status is the command's.
#
# Nothing depends on it. It fills the private engine's folder (KVMESH_DOCKER_CACHE), whose images tests/compose/run.sh takes
# once it has ended; where it failed they are built there, and fail there, where it counts. Whatever becomes of the
# command, the engine is stopped and the folder removed.
set -euo pipefail
python=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d -t kvmesh-ahead.XXXXXX)
name=kvmesh-ahead-$$
builder=

finish() {
    trap '' INT TERM
    if [ -n "$builder" ]; then
        kill -TERM -- "-$builder" 2>/dev/null || true
        wait "$builder" || true
    fi
    for group in "/sys/fs/cgroup/$name" /sys/fs/cgroup/*/"$name"; do
        [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
    done
    rm -rf --one-file-system "$folder"
}
trap finish EXIT

# Niceness does not reach into containers, which have control groups of their own: a group's share does. A tenth, so that
# what holds a lock of the kernel's is not starved.
share=/sys/fs/cgroup/cpu/$name/cpu.shares tenth=100
[ -d /sys/fs/cgroup/cpu ] || share=/sys/fs/cgroup/$name/cpu.weight tenth=10 # version 2
if [ -z "${KVMESH_NO_BUILD:-}" ] && { mkdir -p "${share%/*}/work" && echo "$tenth" >"$share"; } 2>/dev/null; then
    export KVMESH_DOCKER_CACHE=${KVMESH_DOCKER_CACHE:-$folder/engine}
    (
        echo "$BASHPID" >"${share%/*}/work/cgroup.procs"
        # A session of its own: its end is asked of all its processes at once.
        KVMESH_DOCKER_ASIDE=/$name KVMESH_AHEAD=$folder exec setsid "$here/run.sh" "$python"
    ) >"$folder/log" 2>&1 </dev/null &
    builder=$!
    export KVMESH_AHEAD=$folder KVMESH_AHEAD_PID=$builder
fi

# In the background, so that a signal to this shell is heard at once. The terminal's reaches the command by itself.
env --default-signal=INT,QUIT "$@" &
command=$!
trap : INT
trap 'kill -TERM "$command"' TERM
status=0
wait "$command" || status=$?
while kill -0 "$command" 2>/dev/null; do # a signal has ended the wait, and not yet the command
    status=0
    wait "$command" || status=$?
done
exit "$status"
