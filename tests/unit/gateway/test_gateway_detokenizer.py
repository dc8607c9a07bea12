from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvmesh.loading.tokenizer import TokenizerBundle, load_tokenizer, scripted_tokenizer
from services.gateway.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from services.gateway.tokenizers import ModelTokenizer


@cache
def model(name: str) -> ModelTokenizer:
    return ModelTokenizer(load_tokenizer(name))


@cache
def sentencepiece() -> ModelTokenizer:
    """A small vocabulary with word pieces, byte fallback and a special token, decoded like SentencePiece models."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁bc", "é"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return ModelTokenizer(TokenizerBundle(tokenizer, None, frozenset({1}), None, False, len(pieces), "sp"))


def run(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def test_byte_level_vocabularies_are_recognized() -> None:
    assert isinstance(model("scripted").detokenizer(), ByteDetokenizer)
    assert isinstance(model("smollm2").detokenizer(), ByteDetokenizer)
    assert isinstance(sentencepiece().detokenizer(), ByteDetokenizer)


@pytest.mark.parametrize("name", ["scripted", "smollm2"])
@given(data=st.data())
@settings(max_examples=200)
def test_random_tokens_add_up_to_the_full_decode(name: str, data: st.DataObject) -> None:
    tokenizer = model(name)
    # Low ids of both vocabularies are bytes and special tokens: most of the sequences are broken UTF-8.
    ids = data.draw(st.lists(st.integers(0, 300) | st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    pieces = run(tokenizer.detokenizer(), ids)
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["scripted", "smollm2"])
@given(text=st.text(max_size=60))
def test_real_text_comes_in_whole_characters(name: str, text: str) -> None:
    tokenizer = model(name)
    ids = tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
    pieces = run(tokenizer.detokenizer(), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    # SmolLM2's vocabulary lacks some bytes, so rare characters are broken by the encoding already.
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


def words_and_characters() -> st.SearchStrategy[list[int]]:
    """Token lists of whole characters: pieces, special tokens, and characters spelled in bytes."""
    byte = 2
    piece = st.integers(258, 262).map(lambda token: [token])
    special = st.just([1])
    spelled = st.characters(codec="utf-8", exclude_characters="\ufffd").map(
        lambda c: [byte + value for value in c.encode()]
    )
    return st.lists(piece | special | spelled, max_size=25).map(lambda parts: [t for part in parts for t in part])


@given(words_and_characters())
def test_sentencepiece_adds_up_to_the_full_decode(ids: list[int]) -> None:
    for detokenizer in (WindowDetokenizer(sentencepiece()), sentencepiece().detokenizer()):
        pieces = run(detokenizer, ids)
        assert "".join(pieces) == sentencepiece().decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_window_decoding_of_bytes_ends_like_the_full_decode_or_is_bounded(ids: list[int]) -> None:
    """The window method on a byte vocabulary: equal while nothing stays undecodable longer than the window."""
    tokenizer = model("scripted")
    detokenizer = WindowDetokenizer(tokenizer)
    pieces = run(detokenizer, ids)
    if len(ids) < 16:
        assert "".join(pieces) == tokenizer.decode(ids)
    assert len(detokenizer._ids) <= 32


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    detokenizer = model("scripted").detokenizer()
    assert [detokenizer.push(byte) for byte in "🎉".encode()] == ["", "", "", "🎉"]
    assert detokenizer.push(0xF0) == ""
    assert detokenizer.flush() == "\ufffd"


def test_silent_tokens_do_not_make_the_window_longer() -> None:
    detokenizer = WindowDetokenizer(model("scripted"))
    for _ in range(1000):
        assert detokenizer.push(257) == ""
    assert not detokenizer._ids


def test_tokens_outside_the_vocabulary_are_silent() -> None:
    detokenizer = model("scripted").detokenizer()
    assert detokenizer.push(100_000) == ""
    assert scripted_tokenizer().vocab_size == 258
