#!/usr/bin/env bash
# Builds pyverbs with its own rdma-core into the environment named by $1.
#
# PyPI's pyverbs is an sdist of the whole rdma-core tree, and its extension works only with libibverbs of exactly its own
# version: a plain `pip install` beside a distribution's older libibverbs builds and then does not import. So the tree is
# built in place under $1/pyverbs-sdist, with its own libibverbs and providers, and a .pth file makes `import pyverbs` find
# it. Cython from 3.1 on refuses one of its files. KVMESH_PYVERBS picks another version.
set -euo pipefail
venv=$(cd "$1" && pwd)
version=${KVMESH_PYVERBS:-59.0}
for tool in cmake ninja cc pkg-config; do
    command -v "$tool" >/dev/null || missing="${missing:-} $tool"
done
if [ -n "${missing:-}" ] || ! pkg-config --exists libnl-3.0 libnl-route-3.0 2>/dev/null; then
    echo "make rdma needs cmake, ninja, a C compiler, pkg-config and libnl's headers (missing:${missing:- libnl}). Debian:" >&2
    echo "  apt-get install cmake ninja-build gcc pkg-config libnl-3-dev libnl-route-3-dev libudev-dev python3-dev" >&2
    exit 1
fi
"$venv/bin/python" -m pip --disable-pip-version-check install -q 'cython>=3.0,<3.1'
sdist=$venv/pyverbs-sdist
tree=$sdist/rdma-core
if [ ! -f "$tree/CMakeLists.txt" ]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    echo 'cython<3.1' >"$scratch/constraint.txt"
    PIP_CONSTRAINT=$scratch/constraint.txt "$venv/bin/python" -m pip --disable-pip-version-check download -q --no-deps \
        --no-binary pyverbs -d "$scratch" "pyverbs==$version"
    archive=$(find "$scratch" -name 'pyverbs-*.tar.gz' | head -n 1)
    [ -n "$archive" ] || { echo "the sdist of pyverbs $version could not be downloaded" >&2; exit 1; }
    mkdir -p "$sdist"
    tar -xzf "$archive" -C "$sdist" --strip-components=1
fi
mkdir -p "$tree/build"
cd "$tree/build"
PATH=$venv/bin:$PATH cmake -GNinja -DIN_PLACE=1 -DNO_MAN_PAGES=1 -DPYTHON_EXECUTABLE="$venv/bin/python" \
    -DCYTHON_EXECUTABLE="$venv/bin/cython" .. >cmake.log || { tail -n 20 cmake.log >&2; exit 1; }
PATH=$venv/bin:$PATH ninja >ninja.log || { tail -n 20 ninja.log >&2; exit 1; }
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
echo "$tree/build/python" >"$site/kvmesh-pyverbs.pth"
cd /
"$venv/bin/python" - <<'PYTHON'
import pyverbs.device
from pyverbs.pyverbs_error import PyverbsError

try:
    names = [device.name.decode() for device in pyverbs.device.get_device_list()]
except PyverbsError:
    names = []  # the kernel has no RDMA at all
print("pyverbs works; RDMA devices:", ", ".join(names) or "none here")
PYTHON
