"""Labels: both formats, and errors that name file, line and column."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tools.training import train_complexity
from tools.training.complexity.labels import MAX_TEXT_CHARS, LabelError, Row, read

GOOD = {"source": "made", "subject": "law", "text": "Why?", "weak": 1, "strong": False}
WEAK, STRONG = "mixtral-8x7b-instruct-v0.1", "gpt-4-1106-preview"


def _jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n", encoding="utf-8")
    return path


def _csv(path: Path, rows: list[list[object]], columns: tuple[str, ...] = ("prompt", WEAK, STRONG)) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def test_jsonl_rows_once_each(tmp_path: Path) -> None:
    _jsonl(tmp_path / "b.jsonl", [GOOD, "", {**GOOD, "text": "How?", "weak": 0, "more": 1}])
    _jsonl(tmp_path / "a.jsonl", [GOOD])
    assert read([tmp_path]) == [Row("made", "law", "Why?", True, False), Row("made", "law", "How?", False, False)]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "x.jsonl:2: column 2: not JSON"),
        ("[1]", "x.jsonl:2: column 1: not an object"),
        ({**GOOD, "weak": 2}, "x.jsonl:2: column 'weak'"),
        ({**GOOD, "weak": "1"}, "x.jsonl:2: column 'weak'"),
        ({**GOOD, "weak": 1.0}, "x.jsonl:2: column 'weak'"),
        ({**GOOD, "strong": None}, "x.jsonl:2: column 'strong'"),
        ({**GOOD, "text": " "}, "x.jsonl:2: column 'text'"),
        ({**GOOD, "text": "a" * (MAX_TEXT_CHARS + 1)}, "x.jsonl:2: column 'text'"),
        ({**GOOD, "subject": 3}, "x.jsonl:2: column 'subject'"),
        ({k: v for k, v in GOOD.items() if k != "source"}, "x.jsonl:2: column 'source'"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(
    tmp_path: Path, row: object, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _jsonl(tmp_path / "x.jsonl", [GOOD, row, {**GOOD, "text": "Next?"}])
    with pytest.raises(LabelError) as caught:
        read([path])
    assert len(caught.value.problems) == 1
    assert says in caught.value.problems[0]
    out = tmp_path / "weights.npz"
    assert train_complexity.main([str(path), "--out", str(out), "--embedder", "hash"]) == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_bytes_that_are_no_text_and_many_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xff\xfe\n" * 50)
    with pytest.raises(LabelError, match="and 30 more") as caught:
        read([path])
    assert len(caught.value.problems) == 50


def test_routellms_folder_as_it_is(tmp_path: Path) -> None:
    responses = tmp_path / "mmlu" / "responses"
    responses.mkdir(parents=True)
    whole = 'Where is "it",\nand why?\nA. here\nB. there\nC. A. twice\nD. nowhere\nAnswer:'
    _csv(responses / "mmlu_formal_logic.csv", [[whole, True, False], ["Who?\nA. a\nB. b\nAnswer:", False, True]])
    (tmp_path / "gsm8k").mkdir()
    sums = _csv(
        tmp_path / "gsm8k" / "gsm8k_responses.csv",
        [["Ann has 3 apples.\nHow many?", "False", "True", "3"]],
        ("prompt", "mistralai/Mixtral-8x7B-Instruct-v0.1", STRONG, "response"),
    )
    _jsonl(tmp_path / "gsm8k" / "contaminated_prompts.jsonl", [{"eval_prompt": "x"}])
    stem = 'Where is "it",\nand why?'
    assert read([tmp_path]) == [
        Row("mmlu", "formal_logic", stem, True, False),
        Row("mmlu", "formal_logic", "Who?", False, True),
        Row("gsm8k", "gsm8k", "Ann has 3 apples.\nHow many?", False, True),
    ]
    assert read([tmp_path], prompt="whole")[0].text == whole
    assert read([sums]) == [Row("gsm8k", "gsm8k", "Ann has 3 apples.\nHow many?", False, True)]


def test_bad_csv_is_named(tmp_path: Path) -> None:
    path = _csv(tmp_path / "mmlu_a.csv", [["two\nlines", True, True], ["Why?", "yes", True], ["", True, True]])
    with pytest.raises(LabelError) as caught:
        read([path])
    assert caught.value.problems == [
        f"mmlu_a.csv:4: column '{WEAK}': expected True or False, not 'yes'",
        f"mmlu_a.csv:5: column 'prompt': expected a text of 1 to {MAX_TEXT_CHARS} characters",
    ]
    with pytest.raises(LabelError, match=f"no column '{STRONG}'"):
        read([_csv(tmp_path / "mmlu_b.csv", [["a", True]], ("prompt", WEAK))])
    (tmp_path / "mmlu_c.csv").write_bytes(b"prompt,\xff\n")
    with pytest.raises(LabelError, match=r"mmlu_c.csv: not CSV"):
        read([tmp_path / "mmlu_c.csv"])


def test_no_rows_and_no_files(tmp_path: Path) -> None:
    with pytest.raises(LabelError, match="no rows"):
        read([tmp_path])
    with pytest.raises(LabelError, match="no such file"):
        read([tmp_path / "gone.jsonl"])
