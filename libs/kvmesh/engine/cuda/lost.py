"""What becomes of memory on a GPU that has failed: it stays until the process ends."""

from __future__ import annotations

import ctypes


def leave_to_the_process(*things: object) -> None:
    """Never free these, nor what they hold.

    Torch frees pinned memory by recording an event on the streams that used it. A device that has failed takes none,
    the error leaves a destructor, and the process aborts: before anybody was told what had failed.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
