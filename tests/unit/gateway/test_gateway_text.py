"""Text over a corpus: whole characters, equal to the full decode, cut by stop strings wherever tokens and frames fall,
and shown as soon as it can be."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvmesh.loading.tokenizer import TokenizerBundle, load_tokenizer
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.detokenizer import ByteDetokenizer, WindowDetokenizer
from services.gateway.output import Output
from services.gateway.tokenizers import ModelTokenizer

CORPUS = {
    "emoji": "Family 👨‍👩‍👧‍👦, flag 🏴‍☠️🇨🇭, skin 👍🏽, keycap 1️⃣!",
    "cjk": "日本語のテキスト。中文测试，한국어 문장입니다。𠮷野家",
    "combining": "e\u0301a\u0308\u0323 n\u0303o Z\u0351\u036b\u0343algo ｈａｌｆ ﬁ",
    "rtl": "שלום עולם! مرحبا بالعالم \u200fABC\u200e 123",
    "code": "def f(x):\n\treturn {'a': [x**2, \"\\n\"]}  # <b>\r\n\n\n",
    "spaces": "  two  spaces \u00a0 and\u3000wide ",
    "indic": "नमस्ते दुनिया क्षत्रिय தமிழ்",
    "replacement": "a\ufffdb\ufffd\ufffd",
    "controls": "a\x00b\x7f\u2028c\ufeff",
}


def _added(tokenizer: Tokenizer) -> ModelTokenizer:
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    eos = tokenizer.token_to_id("</s>")
    size = tokenizer.get_vocab_size()
    return ModelTokenizer(TokenizerBundle(tokenizer, None, frozenset({eos}), None, False, size, "t"))


# Every other character of the corpus is a piece of its own; the others are spelled in bytes.
_LETTERS = sorted({character for text in CORPUS.values() for character in text.replace(" ", "")})[::2]
_PIECES = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", *_LETTERS]


@cache
def model(name: str) -> ModelTokenizer:
    if name in ("smollm2", "scripted"):
        return ModelTokenizer(load_tokenizer(name))
    pieces = list(dict.fromkeys([*_PIECES, *(f"▁{letter}" for letter in _LETTERS)]))
    if name == "metaspace":
        pieces = [piece for piece in pieces if not piece.startswith("<0x")]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", piece[1:]) for piece in pieces if piece[0] == "▁" and len(piece) > 1 and piece[1:] in vocab]
    fallback = name != "metaspace"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=fallback))
    if name == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        # Without bytes, as Metaspace alone has none: what is no piece is unknown.
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
        return _added(tokenizer)
    always = "always" if name != "gemma" else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=always, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if name == "llama":
        steps.append(decoders.Strip(" ", 1, 0))
    if name == "window":
        # An order that nobody ships: for the decoder of all others.
        steps = [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _added(tokenizer)


MODELS = ["smollm2", "scripted", "llama", "gemma", "window", "metaspace"]
every_model = pytest.mark.parametrize("name", MODELS)


def ids_of(name: str, text: str) -> list[int]:
    return list(model(name)._tokenizer.encode(text, add_special_tokens=False).ids)


def test_which_decoder_is_whose() -> None:
    kinds = {name: type(model(name).detokenizer()) for name in MODELS}
    assert kinds.pop("window") is WindowDetokenizer
    assert set(kinds.values()) == {ByteDetokenizer}


@every_model
@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS.keys())
def test_pieces_are_whole_characters_and_add_up(name: str, text: str) -> None:
    tokenizer = model(name)
    ids = ids_of(name, text)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in ids]
    rest = detokenizer.flush()
    full = tokenizer._tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) + rest == full
    if full == text:
        # All of it was certain before the end, but for a window that ends in what looks unfinished.
        assert rest == "" or (name == "window" and rest.endswith("\ufffd"))
    for piece in pieces:
        piece.encode()
    if name != "window":
        _shown_as_soon_as_whole(tokenizer, ids, pieces)


def _shown_as_soon_as_whole(tokenizer: ModelTokenizer, ids: list[int], pieces: list[str]) -> None:
    """After each token all is out that its bytes make certain."""
    data, shown = b"", ""
    for token, piece in zip(ids, pieces, strict=True):
        data, shown = data + tokenizer.token_bytes(token), shown + piece
        whole = data
        while whole and (cut := whole.decode("utf-8", "ignore").encode()) != whole:
            # Only an unfinished last character may be missing.
            assert len(whole) - len(cut) <= 3 or "\ufffd" in shown
            whole = cut
        assert shown.lstrip(" ") == whole.decode().lstrip(" ") or "\ufffd" in shown


@every_model
@given(st.data())
@settings(max_examples=25)
def test_any_tokens_add_up(name: str, data: st.DataObject) -> None:
    """Also of tokens that no text becomes, as long as their bytes are characters."""
    tokenizer = model(name)
    low = st.integers(0, min(700, tokenizer.vocab_size - 1))
    spelled = st.characters(codec="utf-8", exclude_characters="\ufffd").map(lambda c: ids_of(name, c))
    parts = data.draw(st.lists(low.map(lambda token: [token]) | spelled, max_size=20))
    ids = [token for part in parts for token in part]
    detokenizer = tokenizer.detokenizer()
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    full = tokenizer._tokenizer.decode(ids, skip_special_tokens=True)
    if name in ("smollm2", "scripted", "metaspace") or "\ufffd" not in full:
        assert text == full
    # Else byte fallback spoils whole characters beside broken ones, once it sees them all.


# --- stop strings
def expected(text: str, stops: list[str], after: int = 0) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first, not within the first `after` characters."""
    for end in range(after + 1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held(text: str, stops: list[str]) -> str:
    """The longest end of the text that may become a stop string."""
    for start in range(len(text)):
        if any(stop.startswith(text[start:]) and stop != text[start:] for stop in stops):
            return text[start:]
    return ""


def run(
    name: str, ids: list[int], stops: list[str], cuts: list[int], *, min_tokens: int = 0, end: bool = True
) -> tuple[list[pb.Delta], Output]:
    """The deltas of an output whose tokens come in frames, cut at `cuts`."""
    sampling = pb.SamplingParams(stop=stops, n=1, best_of=1, min_tokens=min_tokens)
    output = Output(sampling, model(name))
    deltas = []
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    for start, stop in pairwise(edges):
        given_delta = engine_pb2.SequenceDelta(token_ids=ids[start:stop])
        if end and stop == len(ids) and start != stop:
            given_delta.finish_reason = pb.FINISH_REASON_LENGTH
        delta, _ = output.feed(given_delta)
        if delta is not None:
            deltas.append(delta)
    return deltas, output


def stops_of(text: str) -> st.SearchStrategy[list[str]]:
    """Pieces of the text itself, overlapping ones too, and some that it does not hold."""
    piece = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6)).map(lambda p: text[p[0] : p[0] + p[1]])
    near = st.tuples(piece, st.sampled_from("x\u0301👧 \n")).map(lambda p: p[0] + p[1])
    return st.lists(piece | near, min_size=1, max_size=4, unique=True)


@every_model
@given(st.data())
@settings(max_examples=25)
def test_stop_strings_however_tokens_and_frames_are_cut(name: str, data: st.DataObject) -> None:
    text = model(name).decode(ids_of(name, data.draw(st.sampled_from(sorted(CORPUS.values())))))
    ids = ids_of(name, text)
    if model(name).decode(ids) != text:
        return
    stops = data.draw(stops_of(text))
    cuts = data.draw(st.lists(st.integers(0, 200), max_size=6))
    shown, stop = expected(text, stops)
    for where in (cuts, [], list(range(len(ids)))):
        deltas, output = run(name, ids, stops, where)
        assert "".join(delta.text for delta in deltas) == shown
        assert deltas[-1].stop_reason == (stop or "")
        assert deltas[-1].finish_reason == (pb.FINISH_REASON_LENGTH if stop is None else pb.FINISH_REASON_STOP)
        # Tokens up to the one that completed the stop string, each once.
        count = len(output.tokens(0))
        assert [token for delta in deltas for token in delta.token_ids] == ids[:count]
        if stop is not None:
            assert shown + stop in model(name).decode(ids[:count])
            assert "\ufffd" in text or stop not in model(name).decode(ids[: count - 1])[len(shown) :]


@every_model
@given(st.data())
@settings(max_examples=20)
def test_text_is_shown_as_soon_as_no_stop_string_can_begin_in_it(name: str, data: st.DataObject) -> None:
    text = model(name).decode(ids_of(name, data.draw(st.sampled_from(sorted(CORPUS.values())))))
    ids = ids_of(name, text)
    stops = data.draw(stops_of(text))
    detokenizer, seen, shown = model(name).detokenizer(), "", ""
    deltas, _ = run(name, ids, stops, list(range(len(ids))), end=False)
    for token, delta in zip(ids, [d for d in deltas if d.token_ids], strict=False):
        seen, shown = seen + detokenizer.push(token), shown + delta.text
        if delta.finish_reason:
            break
        assert shown + held(seen, stops) == seen


@given(st.text("ab¤", max_size=12), st.lists(st.text("ab¤", min_size=1, max_size=3), max_size=3), st.integers(0, 12))
@settings(max_examples=120)
def test_no_stop_string_is_complete_before_min_tokens(text: str, stops: list[str], min_tokens: int) -> None:
    """One may begin before; nothing of it is shown then."""
    ids = ids_of("scripted", text)
    after = len(model("scripted").decode(ids[:min_tokens]).rstrip("\ufffd"))
    shown, stop = expected(text, stops, after)
    for cuts in ([], list(range(len(ids)))):
        deltas, _ = run("scripted", ids, stops, cuts, min_tokens=min_tokens)
        assert "".join(delta.text for delta in deltas) == shown
        if ids:
            assert deltas[-1].stop_reason == (stop or "")


@every_model
def test_an_output_goes_on_where_it_was_interrupted(name: str) -> None:
    """At every token: as it does when a worker is lost, or a shared generation moves."""
    for text in CORPUS.values():
        ids = ids_of(name, text)
        whole, _ = run(name, ids, ["never there"], [])
        for at in range(0, len(ids), 3):
            before, _ = run(name, ids[:at], ["never there"], [], end=False)
            output = Output(pb.SamplingParams(stop=["never there"], n=1, best_of=1), model(name))
            output.restore(0, ids[:at])
            delta, _ = output.feed(engine_pb2.SequenceDelta(token_ids=ids[at:], finish_reason=pb.FINISH_REASON_LENGTH))
            assert delta is not None
            assert "".join(d.text for d in before) + delta.text == whole[-1].text
