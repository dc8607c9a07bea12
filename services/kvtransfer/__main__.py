"""`python -m services.kvtransfer`."""

import sys

from kvmesh.config import KvTransferSettings
from kvmesh.rpc import run_service
from services.kvtransfer.service import build

if __name__ == "__main__":
    sys.exit(run_service(KvTransferSettings, build))
