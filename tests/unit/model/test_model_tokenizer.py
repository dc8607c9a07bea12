"""Tokenizers against transformers' conversion of the same GGUF, and round trips."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvmesh.errors import DataLoss, NotFound
from kvmesh.loading.tokenizer import TokenizerBundle, from_directory, load_tokenizer, scripted_tokenizer

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnew\r\nlines\n\n\n   indented",
    "I'll can't we've SHE'S o'clock",
    "in 1984, 3.14159 and 007 or 1,234,567.89",
    "x=10**9+7;y=0xFFee22",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n",
    "naïve café Ünïcödé ﬁ ½ Å",
    "Привет, мир! Γειά σου Κόσμε",
    "日本語のテキスト、中文文本。한국어",
    "مرحبا بالعالم שלום",
    "👩‍👩‍👧‍👦 🎉🇫🇷 👍🏽",
    "a\u200bb\u00a0c\u2028d\ufeffe",
    "e\u0301 vs é",
    "\x00\x01\x7f control",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "not<|im_end|>spaced <|endoftext|><|unknown|>",
    "٣٤٥ ४५६ ①②③ ²³",
    "word" * 300,
    "$€£¥ %^&*()[]{}<>?/\\|~`",
]


@pytest.fixture(scope="module")
def bundle(smollm2_path: Path) -> TokenizerBundle:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> PreTrainedTokenizerFast:
    """transformers' conversion, with the one thing it drops put back: the published tokenizer splits at every numeric
    character before the byte-level regex."""
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    return tokenizer


@pytest.fixture(scope="module")
def untouched(smollm2_path: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)


def test_smollm2_facts(bundle: TokenizerBundle) -> None:
    assert bundle.vocab_size == 49152
    assert bundle.eos_token_ids == {2}
    assert bundle.bos_token_id == 1
    assert not bundle.add_bos
    assert bundle.chat_template is not None
    assert "<|im_start|>" in bundle.chat_template
    assert bundle.fingerprint == load_tokenizer("smollm2").fingerprint
    assert bundle.fingerprint != load_tokenizer("scripted").fingerprint


@pytest.mark.parametrize("text", CORPUS)
def test_encodes_like_transformers(bundle: TokenizerBundle, reference: PreTrainedTokenizerFast, text: str) -> None:
    ours = bundle.tokenizer.encode(text, add_special_tokens=False).ids
    assert ours == reference.encode(text, add_special_tokens=False)
    if bundle.tokenizer.decode(ours, skip_special_tokens=False) != text:
        # The model's vocabulary lacks the lead bytes of planes that hold no characters.
        assert any(ord(c) >= 0x40000 for c in text)


@pytest.mark.parametrize("text", [t for t in CORPUS if not any(c.isnumeric() and not c.isascii() for c in t)])
def test_encodes_like_transformers_untouched(
    bundle: TokenizerBundle, untouched: PreTrainedTokenizerFast, text: str
) -> None:
    ours = bundle.tokenizer.encode(text, add_special_tokens=False).ids
    assert ours == untouched.encode(text, add_special_tokens=False)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_any_text_encodes_like_transformers(
    bundle: TokenizerBundle, reference: PreTrainedTokenizerFast, text: str
) -> None:
    ours = bundle.tokenizer.encode(text, add_special_tokens=False).ids
    assert ours == reference.encode(text, add_special_tokens=False)
    # The vocabulary lacks some control bytes and the lead bytes of planes without characters; those are dropped.
    if not set(text.encode()) & {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}:
        assert bundle.tokenizer.decode(ours, skip_special_tokens=False) == text


def test_digits_stand_alone(bundle: TokenizerBundle) -> None:
    # The model was trained with every digit its own token; a merge of two would be a silent loss of quality.
    tokens = bundle.tokenizer.encode("year 1984 v2.0.17", add_special_tokens=False).tokens
    assert [t for t in tokens if any(c.isdigit() for c in t)] == list("19842017")


def test_special_tokens_are_one_id_and_skipped_on_demand(bundle: TokenizerBundle) -> None:
    ids = bundle.tokenizer.encode("<|im_start|>a<|im_end|>", add_special_tokens=False).ids
    assert ids[0] == 1
    assert ids[-1] == 2
    assert bundle.tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_directory_equals_gguf(bundle: TokenizerBundle, reference: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path)
    other = from_directory(tmp_path)
    assert other.vocab_size == bundle.vocab_size
    assert other.eos_token_ids == bundle.eos_token_ids
    assert other.bos_token_id == bundle.bos_token_id
    assert other.chat_template == bundle.chat_template
    assert other.add_bos is False
    for text in CORPUS:
        assert other.tokenizer.encode(text, add_special_tokens=False).ids == reference.encode(
            text, add_special_tokens=False
        )


def test_directory_with_eos_list_and_named_templates(reference: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    config["eos_token"] = {"content": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    other = from_directory(tmp_path)
    assert other.chat_template == "D"
    assert other.eos_token_ids == {0, 2, 5}


@pytest.mark.parametrize("cut", [0, 1, 100, 5000])
def test_cut_tokenizer_json_is_data_loss(reference: PreTrainedTokenizerFast, tmp_path: Path, cut: int) -> None:
    reference.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataLoss, match=r"tokenizer\.json"):
        from_directory(tmp_path)


def test_directory_without_tokenizer_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        from_directory(tmp_path)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_scripted_is_one_id_a_byte(text: str) -> None:
    tokenizer = SCRIPTED.tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode()) or "<|im_" in text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_scripted_specials() -> None:
    ids = SCRIPTED.tokenizer.encode("<|im_start|>a<|im_end|>", add_special_tokens=False).ids
    assert ids == [256, 97, 257]
    assert SCRIPTED.eos_token_ids == {257}
    assert SCRIPTED.vocab_size == 258


def test_gateway_side_imports_no_torch() -> None:
    code = (
        "import sys, kvmesh.loading.tokenizer, kvmesh.loading.source as s; s.describe('scripted');"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    paths = [p for p in sys.path if p]
    assert subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"]).returncode == 0


SCRIPTED = scripted_tokenizer()
