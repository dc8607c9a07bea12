"""A remembered answer as a stream: its text in pieces that join to it byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2

# Characters and tokens of one event: a large answer is not one message.
MAX_CHARS = 1024
MAX_TOKENS = 1024


def deltas(answer: router_pb2.CachedAnswer) -> Iterator[pb.Delta]:
    """The answer's choices one after the other; the last delta of each has its finish reason.

    Text is cut between characters. Tokens are spread evenly over the pieces: they need not line up with the text.
    """
    for index, choice in enumerate(answer.choices):
        text, ids = choice.text, choice.token_ids
        pieces = max(1, -(-len(text) // MAX_CHARS), -(-len(ids) // MAX_TOKENS))
        for piece in range(pieces):
            part = slice(piece * len(text) // pieces, (piece + 1) * len(text) // pieces)
            tokens = slice(piece * len(ids) // pieces, (piece + 1) * len(ids) // pieces)
            delta = pb.Delta(choice=index, text=text[part], token_ids=ids[tokens])
            if piece == pieces - 1:
                delta.finish_reason = choice.finish_reason
            yield delta
