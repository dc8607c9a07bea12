"""From a worker's tokens to a client's deltas: detokenization, stop strings, best_of, the answer to remember."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.detokenizer import Detokenizer
from services.gateway.stops import StopMatcher
from services.gateway.tokenizers import ModelTokenizer


@dataclass(slots=True)
class _Choice:
    detokenizer: Detokenizer
    stops: StopMatcher
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    logprob_sum: float = 0.0
    finish: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    stop_reason: str = ""


class Output:
    """Output of a request, over all its attempts. `sampling` has effective values.

    With best_of > n nothing comes out of `feed`; `best` gives the deltas once all choices have ended.
    """

    def __init__(self, sampling: pb.SamplingParams, tokenizer: ModelTokenizer) -> None:
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._shown_logprobs = sampling.HasField("logprobs")
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self.buffered = sampling.best_of > sampling.n
        self._plain = not (self.buffered or sampling.stop or self._shown_logprobs)
        self._choices = [_Choice(tokenizer.detokenizer(), StopMatcher(sampling.stop)) for _ in range(sampling.best_of)]
        self._returned = list(range(sampling.n))

    def restore(
        self,
        choice: int,
        token_ids: Sequence[int],
        finish: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED,
        stop_reason: str = "",
    ) -> None:
        """Take output that has been shown before: text goes on where it stopped, and nothing comes out."""
        given = engine_pb2.SequenceDelta(choice=choice, token_ids=token_ids, finish_reason=finish)
        if finish == pb.FINISH_REASON_STOP and token_ids and stop_reason not in self._sampling.stop:
            given.stop_token_id = token_ids[-1]
        self.feed(given)

    def tokens(self, choice: int) -> list[int]:
        """All tokens of a choice so far."""
        return self._choices[choice].token_ids

    @property
    def unfinished(self) -> list[int]:
        """Choices that have no finish reason yet."""
        return [index for index, choice in enumerate(self._choices) if not choice.finish]

    @property
    def ended(self) -> bool:
        """True when every choice has its finish reason."""
        return all(choice.finish for choice in self._choices)

    @property
    def completion_tokens(self) -> int:
        """Tokens of the choices that are returned (of all, while best_of has not chosen)."""
        return sum(len(self._choices[index].token_ids) for index in self._chosen())

    @property
    def generated(self) -> int:
        """Tokens of all choices, whether they are returned or not."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the returned choices, as traces name them."""
        return [_REASONS[self._choices[index].finish] for index in self._chosen()]

    def _chosen(self) -> list[int]:
        return list(range(len(self._choices))) if self.buffered and not self.ended else self._returned

    def feed(self, given: engine_pb2.SequenceDelta) -> tuple[pb.Delta | None, bool]:
        """Take a worker's delta. Returns (what the client gets now, whether a stop string ended the choice here).

        None when there is nothing to show: the choice had ended, or best_of buffers. True means that the worker does
        not know of the end and must be told.
        """
        choice = self._choices[given.choice]
        if choice.finish:
            return None, False
        ids = list(given.token_ids)
        if self._plain and not given.finish_reason:
            # What nearly every delta is: some tokens more, and nothing else to say.
            push = choice.detokenizer.push
            text = push(ids[0]) if len(ids) == 1 else "".join(map(push, ids))
            choice.token_ids += ids
            choice.text.append(text)
            return pb.Delta(choice=given.choice, text=text, token_ids=ids), False
        # The stop token is output, but not text.
        spoken = len(ids) - (1 if ids and given.HasField("stop_token_id") else 0)
        pieces: list[str] = []
        matched = False
        taken = len(ids)
        for position in range(spoken):
            shown, stop = self._push(choice, ids[position], len(choice.token_ids) + position + 1)
            pieces.append(shown)
            if stop is not None:
                choice.finish, choice.stop_reason = pb.FINISH_REASON_STOP, stop
                matched, taken = True, position + 1
                break
        if not matched and given.finish_reason:
            matched = self._finish(choice, given, pieces)
        choice.token_ids.extend(ids[:taken])
        logprobs = list(given.logprobs[:taken])
        choice.logprob_sum += sum(entry.logprob for entry in logprobs)
        text = "".join(pieces)
        choice.text.append(text)
        shown_logprobs = [self.name_tokens(entry) for entry in logprobs] if self._shown_logprobs else []
        told = matched and not given.finish_reason
        if self.buffered:
            choice.logprobs.extend(shown_logprobs)
            return None, told
        return (
            pb.Delta(
                choice=given.choice,
                text=text,
                token_ids=ids[:taken],
                logprobs=shown_logprobs,
                finish_reason=choice.finish,
                stop_reason=choice.stop_reason,
            ),
            told,
        )

    def _push(self, choice: _Choice, token_id: int, count: int) -> tuple[str, str | None]:
        # Like stop tokens, stop strings do not end an output that is still shorter than min_tokens.
        return choice.stops.push(choice.detokenizer.push(token_id), armed=count > self._sampling.min_tokens)

    def _finish(self, choice: _Choice, given: engine_pb2.SequenceDelta, pieces: list[str]) -> bool:
        """The worker ended the choice; True when the last characters complete a stop string after all."""
        shown, stop = choice.stops.push(choice.detokenizer.flush())
        pieces.append(shown)
        if stop is not None:
            choice.finish, choice.stop_reason = pb.FINISH_REASON_STOP, stop
            return True
        pieces.append(choice.stops.flush())
        choice.finish = given.finish_reason
        if given.HasField("stop_token_id") and given.stop_token_id in self._stop_ids:
            choice.stop_reason = str(given.stop_token_id)
        return False

    def best(self) -> list[pb.Delta]:
        """best_of's result: the n choices with the highest mean log-probability, one delta each, numbered anew."""
        assert self.buffered
        assert self.ended

        def mean(index: int) -> float:
            choice = self._choices[index]
            return choice.logprob_sum / max(1, len(choice.token_ids))

        order = sorted(range(len(self._choices)), key=lambda index: (-mean(index), index))
        self._returned = order[: self._sampling.n]
        return [
            pb.Delta(
                choice=rank,
                text="".join(choice.text),
                token_ids=choice.token_ids,
                logprobs=choice.logprobs,
                finish_reason=choice.finish,
                stop_reason=choice.stop_reason,
            )
            for rank, choice in enumerate(self._choices[index] for index in self._returned)
        ]

    def name_tokens(self, entry: pb.TokenLogprob) -> pb.TokenLogprob:
        """The entry with the bytes of its tokens, which workers do not know."""
        if not entry.token:
            entry.token = self._tokenizer.raw_bytes(entry.token_id)
        for top in entry.top:
            if not top.token:
                top.token = self._tokenizer.raw_bytes(top.token_id)
        return entry

    def answer(self, revision: str, prompt_tokens: int) -> router_pb2.CachedAnswer | None:
        """The answer to remember: only when every returned choice ended by stop."""
        choices = [self._choices[index] for index in self._returned]
        if not all(choice.finish == pb.FINISH_REASON_STOP for choice in choices):
            return None
        return router_pb2.CachedAnswer(
            revision=revision,
            prompt_tokens=prompt_tokens,
            choices=[
                router_pb2.CachedChoice(
                    text="".join(choice.text), token_ids=choice.token_ids, finish_reason=choice.finish
                )
                for choice in choices
            ],
        )


def worker_sampling(sampling: pb.SamplingParams, *, choices: int = 0, scored: bool = False) -> pb.SamplingParams:
    """What the worker gets: no stop strings, and log-probabilities where best_of must weigh choices.

    Those are weighed here, over all attempts: a worker knows neither of stop strings nor of what ran elsewhere.
    `choices`: of them all, so many run there (0 = all). `scored`: the prompt's scores are here already.
    """
    out = pb.SamplingParams()
    out.CopyFrom(sampling)
    if sampling.best_of > sampling.n and not sampling.HasField("logprobs"):
        out.logprobs = 0
    if choices and choices != sampling.best_of:
        out.n = out.best_of = choices
    if scored:
        out.ClearField("prompt_logprobs")
    del out.stop[:]
    return out


_REASONS = {
    pb.FINISH_REASON_UNSPECIFIED: "error",
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}
