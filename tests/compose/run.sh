#!/usr/bin/env bash
# `make test-compose`: builds every CPU image, holds its size against its limit, and runs tests/compose on them, with the
# Python given as $1 (default .venv/bin/python); further arguments go to pytest. The engine is the user's own where one
# with compose 2 answers, else a private one (root on Debian), which leaves nothing behind. Exit status 77: neither.
#   KVMESH_DOCKER_CACHE  a folder that keeps the private engine's images and build cache for the next run
#   KVMESH_IMAGE_TAG     the images' tag (default dev); KVMESH_NO_BUILD=1: they are there already
#   KVMESH_SOAK=1        more rounds of kills, more services restarted under load, and the chart's pods are run
# All of it ends within BOUND_S, whatever hangs.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-.venv/bin/python}
shift || true
if [ $# -eq 0 ]; then
    set -- tests/compose
    # With the images there, the chart's pods can run too.
    if [ -n "${KVMESH_SOAK:-}" ]; then
        export KVMESH_CHART_RUN=1
        set -- tests/compose tests/chart/test_run.py
    fi
fi
export KVMESH_IMAGE_TAG=${KVMESH_IMAGE_TAG:-dev}
export KVMESH_TAG=$KVMESH_IMAGE_TAG
BOUND_S=1080
[ -z "${KVMESH_SOAK:-}" ] || BOUND_S=21600
# With SIGINT pytest still takes its mesh down.
bounded() {
    left=$((BOUND_S - SECONDS))
    timeout --foreground --signal=INT --kill-after=120 "$((left > 1 ? left : 1))" "$@"
}

folder=$(mktemp -d -t kvmesh-docker.XXXXXX)
finish() {
    status=$?
    trap - EXIT
    trap '' INT TERM
    "$python" tests/compose/docker_kit.py down "$folder" || status=1
    rm -rf --one-file-system "$folder"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM
lines=$(bounded "$python" tests/compose/docker_kit.py up "$folder") || exit $?
eval "$lines"
if [ -z "${KVMESH_NO_BUILD:-}" ]; then
    bounded "$python" tools/images.py --tag "$KVMESH_IMAGE_TAG"
else
    "$python" tools/images.py --tag "$KVMESH_IMAGE_TAG" --sizes
fi
OMP_NUM_THREADS=1 bounded "$python" -m pytest -p no:cacheprovider --color=no --durations=8 "$@"
