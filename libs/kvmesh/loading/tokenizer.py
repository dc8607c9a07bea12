"""Tokenizers for every kind of model spec, with what a gateway needs beside them. Torch-free.

Encode with `add_special_tokens=False` always, and put `bos_token_id` in front of raw prompts where `add_bos` says so:
a chat template writes its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from kvmesh.errors import DataLoss, InvalidArgument
from kvmesh.loading.gguf import GgufFile
from kvmesh.loading.hf_model import read_json
from kvmesh.loading.source import SCRIPTED_EOS, ModelSource, resolve

CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# token types of ggml
_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"qwen2": _CONTRACTIONS + _WORDS % r"\p{N}", "llama-bpe": _CONTRACTIONS + _WORDS % r"\p{N}{1,3}"}
_GPT2_LIKE = frozenset({"default", "gpt-2", "gpt2"})
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """A tokenizer and the facts around it. `chat_template` is Jinja, None where the model has none.

    vocab_size counts the tokenizer's ids (a model's embedding may be padded beyond it). `fingerprint`: 16 hex digits;
    equal ones tokenize equally.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    add_bos: bool
    vocab_size: int
    fingerprint: str


def load_tokenizer(spec: str) -> TokenizerBundle:
    """The tokenizer of a model spec. NotFound, DataLoss (cut file), InvalidArgument (unsupported kind)."""
    source = resolve(spec)
    if source.kind == "gguf" and source.path is not None:
        with GgufFile(source.path) as file:
            return from_gguf(file)
    if source.kind == "hf" and source.path is not None:
        return from_directory(source.path)
    return scripted_tokenizer(source)


def _fingerprint(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:16]


def _pre_tokenizer(kind: str, where: Path) -> Any:
    if kind in _GPT2_LIKE:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if kind in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[kind]), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise InvalidArgument(f"{where}: pre-tokenizer {kind!r} is not supported")


def _token_id(file: GgufFile, key: str, count: int) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, int) and 0 <= value < count else None


def from_gguf(file: GgufFile) -> TokenizerBundle:
    """Byte-level BPE from GGUF metadata. InvalidArgument for SentencePiece and other kinds, DataLoss for a cut one."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise InvalidArgument(f"{file.path}: tokenizer kind {kind!r} is not supported (gpt2-style BPE is)")
    pre = file.get("tokenizer.ggml.pre", str, "default")
    tokens: list[str] = file.get("tokenizer.ggml.tokens", list)
    merges: list[str] = file.get("tokenizer.ggml.merges", list)
    types = file.metadata.get("tokenizer.ggml.token_type")
    types = types if isinstance(types, np.ndarray) else np.ones(len(tokens), dtype=np.int32)
    if len(types) != len(tokens) or not all(isinstance(t, str) for t in (*tokens, *merges)):
        raise DataLoss(f"{file.path}: the vocabulary's {len(tokens)} tokens and {len(types)} types disagree (corrupt)")
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the Rust side raises plain Exception for a merge outside the vocabulary
        raise DataLoss(f"{file.path}: the merges do not fit the vocabulary (corrupt): {error}") from None
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, file.path)
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(tokens[i], special=int(types[i]) == _CONTROL, normalized=False)
        for i in np.flatnonzero((types == _CONTROL) | (types == _USER_DEFINED)).tolist()
    ]
    tokenizer.add_tokens(added)
    eos = {_token_id(file, key, len(tokens)) for key in ("eos_token_id", "eot_token_id")} - {None}
    template = file.metadata.get("tokenizer.chat_template")
    bos = _token_id(file, "bos_token_id", len(tokens))
    return TokenizerBundle(
        tokenizer=tokenizer,
        chat_template=template if isinstance(template, str) else None,
        eos_token_ids=frozenset(i for i in eos if i is not None),
        bos_token_id=bos,
        add_bos=bos is not None and bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)),
        vocab_size=tokenizer.get_vocab_size(),
        fingerprint=_fingerprint(["gguf", pre, *tokens, "", *merges, types.astype(np.int32).tobytes().hex()]),
    )


def _special_id(tokenizer: Tokenizer, value: Any) -> int | None:
    """tokenizer_config.json writes a special token as a string or as an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return tokenizer.token_to_id(text) if isinstance(text, str) else None


def _template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def from_directory(directory: Path) -> TokenizerBundle:
    """tokenizer.json and, where they exist, tokenizer_config.json, generation_config.json, chat_template.jinja."""
    path = directory / "tokenizer.json"
    read_json(path)  # NotFound and DataLoss with our messages, before the Rust side's
    text = path.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the Rust side raises plain Exception
        raise DataLoss(f"{path}: not a tokenizer (corrupt): {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = read_json(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").exists() else {}
    eos = {_special_id(tokenizer, config.get("eos_token"))} - {None}
    generation = directory / "generation_config.json"
    if generation.exists():
        ids = read_json(generation).get("eos_token_id")
        eos |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    bos = _special_id(tokenizer, config.get("bos_token"))
    return TokenizerBundle(
        tokenizer=tokenizer,
        chat_template=_template(directory, config),
        eos_token_ids=frozenset(i for i in eos if isinstance(i, int)),
        bos_token_id=bos,
        add_bos=bos is not None and tokenizer.encode("").ids[:1] == [bos],
        vocab_size=tokenizer.get_vocab_size(),
        fingerprint=_fingerprint(["hf", text]),
    )


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's convention)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in alphabet)
    alphabet.update({byte: chr(256 + n) for n, byte in enumerate(hidden)})
    return [alphabet[byte] for byte in range(256)]


def scripted_tokenizer(source: ModelSource | None = None) -> TokenizerBundle:
    """For the scripted model: id = byte, then <|im_start|> (256) and <|im_end|> (257, end of sequence); ChatML."""
    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]
    )
    return TokenizerBundle(
        tokenizer=tokenizer,
        chat_template=CHATML_TEMPLATE,
        eos_token_ids=frozenset({SCRIPTED_EOS}),
        bos_token_id=None,
        add_bos=False,
        vocab_size=tokenizer.get_vocab_size(),
        fingerprint=_fingerprint(["scripted-1", CHATML_TEMPLATE]),
    )
