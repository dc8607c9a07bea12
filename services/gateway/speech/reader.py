"""From a choice's raw text to content, reasoning and tool calls."""

from __future__ import annotations

from typing import Protocol

from kvmesh.proto.v1 import inference_pb2 as pb


class Reader(Protocol):
    """Reads the deltas of one request, all its choices. Never holds text back longer than it may belong to a mark."""

    def read(self, delta: pb.Delta) -> pb.Delta:
        """The delta with `text` divided into text, reasoning and tool calls. One that brings a finish reason brings all
        that was held back, and may change the reason to TOOL_CALLS."""


class MakeReader(Protocol):
    """A fresh reader: one for each client that reads an answer."""

    def __call__(self) -> Reader: ...
