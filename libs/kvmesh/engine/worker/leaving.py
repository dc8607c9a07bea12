"""The end of an engine's process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

log = logging.getLogger(__name__)


def leave(status: int) -> NoReturn:
    """End this process with `status`, after everything else has been closed.

    With a GPU in use at once: what its libraries do at an orderly end waits for nobody. A communicator whose abort is
    still under way, or pinned memory of a device that has failed, then aborts the process, and whoever supervises it
    sees a crash in place of the status.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        sys.exit(status)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Nobody may read it any more.
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    os._exit(status)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Leave with the status of an engine's program, 1 where it fails with an error that nobody expected."""
    try:
        status = main()
    except Exception:
        log.critical("the engine failed", exc_info=True)
        status = 1
    leave(status)
