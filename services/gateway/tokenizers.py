"""Tokenizers of the served models: text to tokens and back, off the event loop where it takes long."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tokenizers import decoders

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, Unavailable
from kvmesh.loading.tokenizer import TokenizerBundle, load_tokenizer
from kvmesh.proto.v1 import engine_pb2
from services.gateway.detokenizer import Detokenizer, Lead, detokenizer
from services.gateway.speech.profile import profile
from services.gateway.templates import ChatTemplate

log = logging.getLogger(__name__)

# About a millisecond of encoding: longer texts must not hold up everybody's tokens.
INLINE_CHARS = 1024
# Pieces that are tokenized in one call.
BATCH_PIECES = 1024
# A template may add a lot around short messages, but not without bound.
TEMPLATE_ROOM_CHARS = 65_536


class ModelTokenizer:
    """One model's tokenizer, chat template and token bytes. Building one takes a moment: do it in a thread."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.bundle = bundle
        self.vocab_size = bundle.vocab_size
        self.fingerprint = bundle.fingerprint
        self._tokenizer = bundle.tokenizer
        added = bundle.tokenizer.get_added_tokens_decoder()
        self._special = frozenset(index for index, token in added.items() if token.special)
        self.profile = profile(bundle.chat_template, {token.content: index for index, token in added.items()})
        # Marks of calls and reasoning are part of an answer's text, also where their tokens are special: they are read.
        self._silent = self._special - frozenset(self.profile.tokens.values())
        self.byte_level = isinstance(bundle.tokenizer.decoder, decoders.ByteLevel)
        self._lead = _lead(bundle.tokenizer.decoder)
        size = max([bundle.vocab_size - 1, *added]) + 1
        self._bytes = [self._bytes_of(index) for index in range(size)]
        self._template = self._compile(added)

    def _compile(self, added: Mapping[int, object]) -> ChatTemplate | None:
        bundle = self.bundle
        if bundle.chat_template is None:
            return None
        special = [str(getattr(added[index], "content", "")) for index in self._special]
        bos = None if bundle.bos_token_id is None else self._tokenizer.id_to_token(bundle.bos_token_id)
        eos = self._tokenizer.id_to_token(min(bundle.eos_token_ids)) if bundle.eos_token_ids else None
        variables = {"bos_token": bos or "", "eos_token": eos or ""}
        try:
            return ChatTemplate(bundle.chat_template, special=special, variables=variables)
        except FailedPrecondition as exc:
            log.error("chat is off for this model: %s", exc)
            return None

    def _bytes_of(self, index: int) -> bytes:
        piece = self._tokenizer.id_to_token(index)
        if piece is None:
            return b""
        if self.byte_level:
            known = [_BYTES.get(character) for character in piece]
            # A token outside the byte alphabet (an added one) stands for itself.
            return piece.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()

    # --- Vocabulary, as the detokenizers ask for it
    def decode(self, ids: Sequence[int]) -> str:
        """Full decode, special tokens skipped but for marks of calls and reasoning."""
        spoken = [index for index in ids if index not in self._silent]
        return self._tokenizer.decode(spoken, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token adds to an answer's text: none for a silent one or one outside the vocabulary."""
        return b"" if token_id in self._silent else self.raw_bytes(token_id)

    def raw_bytes(self, token_id: int) -> bytes:
        """Bytes of a token, special ones included, for log-probability lists."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        return detokenizer(self, self._lead)

    # --- prompts
    async def encode_raw(self, text: str) -> list[int]:
        """Tokens of a raw prompt: control tokens written in it count, and a model that wants a BOS gets it."""
        ids = await self._encode([text])
        bos = self.bundle.bos_token_id
        return [bos, *ids] if self.bundle.add_bos and bos is not None else ids

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_bytes: int,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continued: bool = False,
    ) -> list[int]:
        """Tokens of messages in the model's chat format. FailedPrecondition for a model without one."""
        template = self._template
        if template is None:
            raise FailedPrecondition("the model has no chat template; use Generate")
        room = max_bytes + TEMPLATE_ROOM_CHARS
        size = INLINE_CHARS + 1 if template.slow else _chars((messages, tools))
        return await self._encode(
            await _maybe_thread(
                size,
                lambda: template.render(
                    messages, max_chars=room, tools=tools, variables=variables, continued=continued
                ),
            )
        )

    async def _encode(self, pieces: Sequence[str]) -> list[int]:
        return await _maybe_thread(sum(map(len, pieces)), lambda: self._encode_now(pieces))

    def _encode_now(self, pieces: Sequence[str]) -> list[int]:
        # Only the batch form releases the GIL: `encode` of a long prompt would stop every stream of this process.
        # It takes and gives back its lists with the GIL held: of hundreds of thousands of pieces, some at a time.
        ids: list[int] = []
        for start in range(0, len(pieces), BATCH_PIECES):
            batch = list(pieces[start : start + BATCH_PIECES])
            for piece in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids += piece.ids
        return ids


T = TypeVar("T")


def _chars(value: Any) -> int:
    """About how much text is in it; counts no further once it is too much to be dealt with at once."""
    chars, rest = 0, [value]
    while rest and chars <= INLINE_CHARS:
        item = rest.pop()
        if isinstance(item, Mapping):
            item = [*item.keys(), *item.values()]
        chars += len(item) if isinstance(item, str | list | tuple) else 8
        if isinstance(item, list | tuple) and chars <= INLINE_CHARS:
            rest += item
    return chars


async def _maybe_thread(chars: int, work: Callable[[], T]) -> T:
    return work() if chars <= INLINE_CHARS else await asyncio.to_thread(work)


class TokenizerStore:
    """Loads each tokenizer once, in a thread, and only hands out one that tokenizes as the worker does.

    `spec`: where the tokenizer comes from; "" = from the model's name as the workers report it.
    """

    def __init__(self, spec: str, *, load: Callable[[str], TokenizerBundle] = load_tokenizer) -> None:
        self._spec = spec
        self._load = load
        self._loading: dict[str, asyncio.Task[ModelTokenizer]] = {}

    async def preload(self) -> None:
        """Load the configured tokenizer before the first request; a wrong setting shows at start."""
        if self._spec:
            await self._get(self._spec)

    async def get(self, info: engine_pb2.WorkerInfo) -> ModelTokenizer:
        """The tokenizer of a worker's model; FailedPrecondition when this gateway has none that is equal."""
        spec = self._spec or info.model
        try:
            tokenizer = await self._get(spec)
        except InvalidArgument:
            raise
        except KvmeshError as exc:
            raise FailedPrecondition(f"this gateway has no tokenizer for model {info.model!r}: {exc.message}") from exc
        if info.tokenizer_fingerprint and info.tokenizer_fingerprint != tokenizer.fingerprint:
            raise FailedPrecondition(
                f"the gateway's tokenizer ({spec!r}) differs from that of worker {info.worker_id}",
                details={"gateway": tokenizer.fingerprint, "worker": info.tokenizer_fingerprint},
            )
        return tokenizer

    async def _get(self, spec: str) -> ModelTokenizer:
        task = self._loading.get(spec)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(asyncio.to_thread(self._build, spec), name=f"tokenizer:{spec}")
            self._loading[spec] = task
        # One caller that leaves must not end the load for the others.
        return await asyncio.shield(task)

    def _build(self, spec: str) -> ModelTokenizer:
        try:
            return ModelTokenizer(self._load(spec))
        except KvmeshError:
            raise
        except Exception as exc:
            log.exception("loading the tokenizer %r failed", spec)
            raise Unavailable(f"loading the tokenizer failed ({type(exc).__name__})") from exc


def _lead(decoder: Any) -> Lead | None:
    """What the decoder drops at a text's beginning, where it joins fixed strings of bytes; None where it does more."""
    # Its state is the decoder as tokenizer.json has it: the only way to see what a sequence is made of.
    match json.loads(decoder.__getstate__()) if decoder is not None else {}:
        case {"type": "ByteLevel"}:
            return Lead.NOTHING
        case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}:
            return Lead.NOTHING
        case {"type": "Metaspace", "replacement": "▁"}:
            return Lead.SPACES
        case {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, *rest]}:
            if replace != {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                return None
            if rest == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
                return Lead.SPACE
            return None if rest else Lead.NOTHING
    return None


def _byte_table() -> dict[str, int]:
    """Inverse of the byte-level alphabet: printable bytes stand for themselves, the rest follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_table()
