#!/usr/bin/env bash
# Builds pyverbs into the environment named by $1. pyverbs must match this machine's libibverbs exactly and needs
# cython<3.1, which is why it is no ordinary extra. KVMESH_PYVERBS picks another version of the sdist.
set -euo pipefail
venv=$1
version=${KVMESH_PYVERBS:-59.0}
if ! command -v cmake >/dev/null || ! pkg-config --exists libnl-3.0 libnl-route-3.0 2>/dev/null; then
    echo "make rdma needs cmake, a C compiler, pkg-config, libnl-3-dev and libnl-route-3-dev (Debian: apt-get install" >&2
    echo "cmake gcc pkg-config libnl-3-dev libnl-route-3-dev libudev-dev)." >&2
    exit 1
fi
constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
echo 'cython<3.1' >"$constraint"
PIP_CONSTRAINT="$constraint" "$venv/bin/python" -m pip install "pyverbs==$version"
"$venv/bin/python" -c 'import pyverbs.device as d; print("pyverbs works; devices:", [x.name.decode() for x in d.get_device_list()])'
