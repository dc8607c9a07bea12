"""Labels: prompts that a weak and a strong model answered, right or wrong. Two formats, and errors that name the spot.

- JSONL, a row a line: {"source": "...", "subject": "...", "text": "...", "weak": 0|1, "strong": 0|1}
- the published RouteLLM responses, as they are: a folder with `mmlu_<subject>.csv` and `gsm8k_responses.csv` (or the
  repository's routellm/evals above them), columns `prompt` and one a model, True or False.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MAX_FILES = 4096
MAX_FILE_BYTES = 256 << 20
MAX_TEXT_CHARS = 1 << 20
MAX_NAME_CHARS = 128
SHOWN_ERRORS = 20
WEAK_COLUMNS = ("mixtral-8x7b-instruct-v0.1", "mistralai/mixtral-8x7b-instruct-v0.1")
STRONG_COLUMNS = ("gpt-4-1106-preview",)

Prompt = Literal["stem", "whole"]


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt, and whether the weak and the strong model were right."""

    source: str
    subject: str
    text: str
    weak: bool
    strong: bool


class LabelError(ValueError):
    """Bad rows; each line of the message names file, line and column."""

    def __init__(self, problems: list[str]) -> None:
        more = f"\n… and {len(problems) - SHOWN_ERRORS} more" if len(problems) > SHOWN_ERRORS else ""
        super().__init__("\n".join(problems[:SHOWN_ERRORS]) + more)
        self.problems = problems


def read(paths: list[Path], *, prompt: Prompt = "stem") -> list[Row]:
    """All rows of files and folders, each text once. Raises LabelError for any bad row, or none at all."""
    problems: list[str] = []
    rows: list[Row] = []
    for path in _files(paths, problems):
        if path.stat().st_size > MAX_FILE_BYTES:
            problems.append(f"{path.name}: {path.stat().st_size} bytes; at most {MAX_FILE_BYTES} are read")
        elif path.suffix == ".csv":
            rows += _routellm(path, prompt, problems)
        else:
            rows += _jsonl(path, problems)
    if problems:
        raise LabelError(problems)
    seen: set[str] = set()
    unique = [row for row in rows if not (row.text in seen or seen.add(row.text))]  # type: ignore[func-returns-value]
    if not unique:
        raise LabelError(["no rows: expected .jsonl files, or mmlu_<subject>.csv and gsm8k_responses.csv"])
    return unique


def _files(paths: list[Path], problems: list[str]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (
                sorted(path.rglob("*.jsonl")) + sorted(path.rglob("mmlu_*.csv")) + sorted(path.rglob("gsm8k_*.csv"))
            )
            # Beside the responses RouteLLM lists the prompts that its own training had seen.
            found += [p for p in inside if not p.name.startswith("contaminated")]
        elif path.is_file():
            found.append(path)
        else:
            problems.append(f"{path}: no such file or folder")
    if len(found) > MAX_FILES:
        problems.append(f"{len(found)} files; at most {MAX_FILES} are read")
        return []
    return found


def _jsonl(path: Path, problems: list[str]) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path.name}:{number}"
            try:
                value = json.loads(line.rstrip())
            except ValueError as exc:
                column = exc.colno if isinstance(exc, json.JSONDecodeError) else 1
                problems.append(f"{where}: column {column}: not JSON ({type(exc).__name__})")
                continue
            if not isinstance(value, dict):
                problems.append(f"{where}: column 1: not an object")
                continue
            row = _row(value, where, problems)
            if row is not None:
                yield row


def _row(value: dict[str, object], where: str, problems: list[str]) -> Row | None:
    before = len(problems)
    texts: dict[str, str] = {}
    for column, limit in (("source", MAX_NAME_CHARS), ("subject", MAX_NAME_CHARS), ("text", MAX_TEXT_CHARS)):
        got = value.get(column)
        if not isinstance(got, str) or not got.strip() or len(got) > limit:
            problems.append(f"{where}: column {column!r}: expected a text of 1 to {limit} characters")
        else:
            texts[column] = got
    labels: dict[str, bool] = {}
    for column in ("weak", "strong"):
        got = value.get(column)
        # A float 1.0 or a string "1" is somebody's export gone wrong; a guess would train on it.
        if not isinstance(got, int) or got not in (0, 1):
            problems.append(f"{where}: column {column!r}: expected 0, 1, true or false")
        else:
            labels[column] = bool(got)
    if len(problems) > before:
        return None
    return Row(texts["source"], texts["subject"], texts["text"], labels["weak"], labels["strong"])


def _routellm(path: Path, prompt: Prompt, problems: list[str]) -> Iterator[Row]:
    source, _, rest = path.stem.partition("_")
    subject = rest if source == "mmlu" else source
    csv.field_size_limit(4 * MAX_TEXT_CHARS)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = {name.lower(): name for name in reader.fieldnames or ()}
            weak = next((columns[c] for c in WEAK_COLUMNS if c in columns), None)
            strong = next((columns[c] for c in STRONG_COLUMNS if c in columns), None)
            text = columns.get("prompt")
            missing = [n for n, c in (("prompt", text), (WEAK_COLUMNS[0], weak), (STRONG_COLUMNS[0], strong)) if not c]
            if text is None or weak is None or strong is None:
                problems.append(f"{path.name}:1: no column {missing[0]!r}")
                return
            start = reader.line_num + 1
            for record in reader:
                where, start = f"{path.name}:{start}", reader.line_num + 1
                labels = [_flag(record.get(column), column, where, problems) for column in (weak, strong)]
                stem = _stem(record.get(text) or "") if prompt == "stem" else (record.get(text) or "").strip()
                if not 0 < len(stem) <= MAX_TEXT_CHARS:
                    problems.append(f"{where}: column 'prompt': expected a text of 1 to {MAX_TEXT_CHARS} characters")
                elif labels[0] is not None and labels[1] is not None:
                    yield Row(source, subject, stem, labels[0], labels[1])
    except (csv.Error, UnicodeDecodeError) as exc:
        problems.append(f"{path.name}: not CSV in UTF-8 ({exc})")


def _flag(value: object, column: str, where: str, problems: list[str]) -> bool | None:
    known = {"true": True, "1": True, "false": False, "0": False}
    flag = known.get(str(value).strip().lower())
    if flag is None:
        problems.append(f"{where}: column {column!r}: expected True or False, not {str(value)[:32]!r}")
    return flag


def _stem(prompt: str) -> str:
    """The question alone: choices and the final "Answer:" belong to the benchmark, not to what people ask."""
    return prompt.split("\nA. ", 1)[0].removesuffix("Answer:").strip()
