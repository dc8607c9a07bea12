"""The writer's end of a link over sockets: what completes, and how it breaks."""

from __future__ import annotations

from abc import abstractmethod

from kvmesh.transfer.transports.base import Completion, Outbound, Write


class SocketOutbound(Outbound):
    """Left to do: queueing, moving, and what of it is outstanding."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []
        self._broken = ""
        self._closed = False

    @abstractmethod
    def take(self, write: Write) -> None:
        """Queue a write; the link is not broken."""

    @abstractmethod
    def step(self, budget: int) -> None:
        """Move about `budget` bytes, and append to `completions`. Not called on a broken link. An OSError breaks it."""

    @abstractmethod
    def give_up(self) -> None:
        """The link is broken: everything outstanding completes with `broken`."""

    @abstractmethod
    def release(self) -> None:
        """Let go of memory and sockets; called once, on a broken link."""

    def post(self, write: Write) -> None:
        if self._broken:
            self.completions.append(Completion(write.context, 0, self._broken))
        else:
            self.take(write)

    def poll(self, budget: int) -> list[Completion]:
        if not self._broken:
            try:
                self.step(budget)
            except OSError as error:
                self.fence(f"the data connection broke: {error.strerror}")
        completions, self.completions = self.completions, []
        return completions

    def fence(self, reason: str) -> None:
        self._broken = self._broken or reason
        self.give_up()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.fence("closed")
            self.release()

    @property
    def broken(self) -> str:
        return self._broken
