"""`python -m services.router`: see `--help`."""

import sys

from kvmesh.config import RouterSettings
from kvmesh.rpc import run_service
from services.router.service import build

if __name__ == "__main__":
    sys.exit(run_service(RouterSettings, build))
