"""GSM8K as published: questions with worked answers that end in `#### N`.

- JSON lines `{"question": "...", "answer": "...\\n#### 18"}` (other keys are ignored; an answer may be the number alone)
- CSV with the columns `question` and `answer`, quoted where they hold line breaks
"""

import csv
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from dmpo_jax.errors import UserError
from dmpo_jax.tasks.files import read_lines, wrong

SOURCE = (
    "train.jsonl and test.jsonl are at https://github.com/openai/grade-school-math, "
    "in grade_school_math/data (MIT licence)"
)
_FORM = '{"question": "...", "answer": "... #### 18"}'


class Item(NamedTuple):
    """A question, its worked answer before the hashes, and the text of the true number."""

    question: str
    solution: str
    truth: str


def read_items(path: str) -> list[tuple[int, Item]]:
    """Read (line number, item) of each question. Raises `UserError` naming a line that is wrong."""
    if not os.path.exists(path):
        raise UserError(f"{path!r}: No such file; {SOURCE}")
    lines = read_lines(path)
    start = next(lines, None)
    if start is None:
        raise UserError(f"{path}: holds no questions, expected lines such as {_FORM}; {SOURCE}")
    rows = (_json_rows if start[1].startswith("{") else _csv_rows)(path, _chain(start, lines))
    items = [(number, _item(path, number, row)) for number, row in rows]
    if not items:
        raise UserError(f"{path}: holds no questions, expected a row after the header; {SOURCE}")
    return items


def held_out(questions: list[str], count: int) -> list[bool]:
    """Which questions are kept for validation: the `count` of the smallest hash, whatever the seed, and their duplicates."""
    keys = [hashlib.blake2b(question.encode("utf-8", "replace"), digest_size=8).digest() for question in questions]
    most = sorted(set(keys))[:count]
    return [key <= most[-1] for key in keys] if most else [False] * len(keys)


def _chain(start: tuple[int, str], lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield start
    yield from lines


def _json_rows(path: str, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, Any]]:
    for number, line in lines:
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError):
            raise wrong(path, number, line, "one JSON object", f"write lines such as {_FORM}") from None


def _csv_rows(path: str, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, Any]]:
    at = [0, ""]

    def feed() -> Iterator[str]:
        for at[:] in lines:
            yield f"{at[1]}\n"

    reader, header = csv.reader(feed(), strict=True), []
    while True:
        try:
            fields = next(reader, None)
        except csv.Error:
            raise wrong(path, at[0], at[1], "comma-separated values", "check its quotes") from None
        if fields is None:
            return
        if not header:
            header = [field.strip().lower() for field in fields]
            if not {"question", "answer"} <= set(header):
                expected = f"a CSV header with question and answer, or JSON lines such as {_FORM}"
                raise wrong(path, at[0], at[1], expected, "convert the file to one of these")
        elif len(fields) != len(header):
            raise wrong(path, at[0], at[1], f"{len(header)} fields as in the header", "put texts with commas in quotes")
        else:
            yield at[0], dict(zip(header, fields, strict=True))


def _item(path: str, number: int, row: Any) -> Item:
    question, answer = (row.get("question"), row.get("answer")) if isinstance(row, dict) else (None, None)
    if type(answer) is int and abs(answer) < 10**18:
        answer = str(answer)
    if not all(isinstance(text, str) and text.strip() and _encodes(text) for text in (question, answer)):
        raise wrong(path, number, row if isinstance(row, str) else json.dumps(row), _FORM, "correct or remove the line")
    solution, _, truth = answer.rpartition("####")
    return Item(question.strip(), solution.strip(), truth.strip())


def _encodes(text: str) -> bool:
    """Whether the text has no lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text == text.encode("utf-8", "replace").decode()
