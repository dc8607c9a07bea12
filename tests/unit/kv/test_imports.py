"""The floor stays bare: sidecar, router and gateway import it."""

import os
import subprocess
import sys

CODE = """
import importlib, pkgutil, sys
import kvmesh.kv
for module in pkgutil.iter_modules(kvmesh.kv.__path__, "kvmesh.kv."):
    importlib.import_module(module.name)
print(*sorted({"torch", "grpc", "google", "pydantic"} & {name.split(".")[0] for name in sys.modules}))
"""


def test_kv_imports_neither_torch_nor_grpc():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
