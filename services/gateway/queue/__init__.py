"""Where requests wait while all workers are full."""

from services.gateway.queue.fair import FairQueue
from services.gateway.queue.line import Ticket

__all__ = ["FairQueue", "Ticket"]
