"""The events of a client's stream, built in one place."""

from __future__ import annotations

from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.status import to_frame


def accepted(request_id: str, model: str, revision: str, seed: int, prompt_tokens: int) -> pb.GenerateEvent:
    """First event of every stream."""
    return pb.GenerateEvent(
        accepted=pb.Accepted(
            request_id=request_id, model=model, revision=revision, seed=seed, prompt_tokens=prompt_tokens
        )
    )


def delta(value: pb.Delta) -> pb.GenerateEvent:
    """New output of one choice."""
    return pb.GenerateEvent(delta=value)


def prompt(logprobs: list[pb.TokenLogprob]) -> pb.GenerateEvent:
    """The prompt's log-probabilities."""
    return pb.GenerateEvent(prompt=pb.PromptScored(logprobs=logprobs))


def finished(usage: pb.Usage, served: pb.Served) -> pb.GenerateEvent:
    """Terminal of a request that went well."""
    return pb.GenerateEvent(finished=pb.Finished(usage=usage, served=served))


def failed(error: BaseException, usage: pb.Usage) -> pb.GenerateEvent:
    """Terminal of a request that failed after acceptance."""
    frame = to_frame(error)
    return pb.GenerateEvent(
        error=pb.StreamError(
            code=frame.code, reason=frame.reason, message=frame.message, retryable=frame.retryable, usage=usage
        )
    )
