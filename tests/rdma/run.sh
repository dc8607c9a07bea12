#!/usr/bin/env bash
# `make test-rdma`: tests/rdma in the soft-RoCE VM, with the Python given as $1 (default .venv/bin/python); further
# arguments go to pytest. On a machine with an RDMA device and pyverbs, plain pytest runs the same tests without a VM.
#   KVMESH_RDMA_TRANSFERS  small transfers (default 2000; 10000 with KVMESH_SOAK=1)
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${1:-$root/.venv/bin/python}
shift || true
case $python in /*) ;; *) python=$PWD/$python ;; esac
if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    echo "test-rdma cannot run here: Debian's pyverbs is built for CPython 3.11, $python is $("$python" -V)" >&2
    exit 77
fi
# Compiling in the VM takes longer than importing; C++ takes half a minute there.
"$python" -m compileall -q "$root/libs" "$root/services" "$root/tests/rdma" "$root/tests/integration" || true
native=${KVMESH_VM_CACHE:-$root/build/rdma-vm}/native
PYTHONPATH=$root/libs "$python" - "$native" <<'PYTHON' || echo "test-rdma: no native code, the VM compiles what it can"
import sys
from pathlib import Path

from kvmesh.native import compile_ahead
from kvmesh.transfer.native import moves
from kvmesh.transfer.transports.verbs.native import rings

for part in (moves, rings):
    compile_ahead(part._SOURCE, part._FLAGS, Path(sys.argv[1]))
PYTHON
[ $# -gt 0 ] || set -- tests/rdma
exec "$root/tests/rdma/vm/boot.sh" \
    "PYTHONPATH=/run/pyverbs:$root/libs:$root" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \
    "KVMESH_RDMA_TRANSFERS=${KVMESH_RDMA_TRANSFERS:-$([ -n "${KVMESH_SOAK:-}" ] && echo 10000 || echo 2000)}" \
    "KVMESH_NATIVE_AHEAD=$native" \
    "$python" -u -m pytest -p no:cacheprovider -s --color=no --durations=8 --timeout=1500 "$@"
