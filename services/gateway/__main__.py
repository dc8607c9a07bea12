"""`python -m services.gateway`: run the gateway."""

import sys

from kvmesh.config import GatewaySettings
from kvmesh.rpc.service import run_service
from services.gateway.app import build

if __name__ == "__main__":
    sys.exit(run_service(GatewaySettings, build))
