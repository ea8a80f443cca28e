"""Files of questions with answers, for the tasks that read them: JSON lines, or CSV with a header."""

import csv
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dmpo_jax.errors import UserError
from dmpo_jax.tasks.files import exists, read_lines, wrong
from dmpo_jax.tasks.task import Example, Features, TaskConfig, check_split


class Item(NamedTuple):
    """A question, its worked answer, "" without one, and the text of the true answer."""

    question: str
    solution: str
    truth: str


class Form(NamedTuple):
    """What a file looks like and where it comes from, for errors; columns of its CSV form; a row as an item, None if wrong."""

    example: str
    source: str
    columns: tuple[str, ...]
    item: Callable[[dict[str, Any]], Item | None]


def read_items(path: str, form: Form) -> list[tuple[int, Item]]:
    """Read (line number, item) of each question. Raises `UserError` naming a line that is wrong."""
    if not exists(path):
        raise UserError(f"{path!r}: No such file; {form.source}")
    lines = read_lines(path)
    start = next(lines, None)
    if start is None:
        raise UserError(f"{path}: holds no questions, expected lines such as {form.example}; {form.source}")
    rows = (_json_rows if start[1].startswith("{") else _csv_rows)(path, form, _chain(start, lines))
    items = [(number, _item(path, form, number, row)) for number, row in rows]
    if not items:
        raise UserError(f"{path}: holds no questions, expected a row after the header; {form.source}")
    return items


def split_items(
    config: TaskConfig, split: str, read: Callable[[str], list[tuple[int, Item]]], source: str
) -> tuple[str, list[tuple[int, Item]]]:
    """The file of a split, and its (line number, item)s. Without a validation file, `validation_size` questions of the training
    file are kept for validation, the same ones whatever the seed. Questions of the test or validation file are not trained on.

    Raises `UserError` where a file is not named, cannot be had or is malformed, or nothing is left to train on.
    """
    check_split(split)
    carved = split != "test" and not config.validation_file
    name = "train_file" if carved else f"{split}_file"
    path = getattr(config, name)
    if not path:
        raise UserError(f'task.{name} = "": {config.name} is read from files; {source}: get them and name one here')
    if name != "train_file":
        return path, read(path)
    others = [file for file in (config.test_file, config.validation_file) if file]
    known = {_letters(item.question) for file in others for _, item in read(file)}
    items = [(line, item) for line, item in read(path) if _letters(item.question) not in known]
    if not items:
        where = " and ".join(others)
        raise UserError(f"task.train_file = {path!r}: all its questions are in {where}; name a file with others")
    if carved:
        held = held_out([item.question for _, item in items], config.validation_size)
        if all(held):
            raise UserError(
                f"task.validation_size = {config.validation_size}: {path} holds {len(items)} questions outside the test file "
                "and some must be left to train on; set it lower, or name a task.validation_file"
            )
        items = [item for item, is_held in zip(items, held, strict=True) if is_held == (split == "validation")]
    return path, items


def as_examples(
    path: str,
    items: list[tuple[int, Item]],
    prompt: str,
    demonstration: Callable[[Item], str],
    features: Callable[[str], Features],
    expected: str,
) -> list[Example]:
    """Items as examples: the question in `{question}` of a prompt.

    Raises `UserError` with the line whose answer `features` does not take.
    """
    result = []
    for line, item in items:
        try:
            arrays = features(item.truth)
        except UserError:
            raise wrong(path, line, item.truth, expected, "correct or remove the line") from None
        result.append(Example(prompt.format(question=item.question), demonstration(item), item.truth, arrays))
    return result


def _letters(question: str) -> str:
    """What two spellings of one question share: it without blanks."""
    return "".join(question.split())


def held_out(questions: list[str], count: int) -> list[bool]:
    """Which questions are kept for validation: the `count` of the smallest hash, whatever the seed, and their duplicates."""
    keys = [hashlib.blake2b(question.encode("utf-8", "replace"), digest_size=8).digest() for question in questions]
    most = sorted(set(keys))[:count]
    return [key <= most[-1] for key in keys] if most else [False] * len(keys)


def text_of(row: dict[str, Any], *keys: str) -> str | None:
    """The first of these columns that holds something, a text or a whole number; None where that is neither, or not UTF-8."""
    value = next((row[key] for key in keys if row.get(key) not in (None, "")), None)
    if type(value) is int and abs(value) < 10**18:
        value = str(value)
    return value if isinstance(value, str) and value.strip() and _encodes(value) else None


def _chain(start: tuple[int, str], lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield start
    yield from lines


def _json_rows(path: str, form: Form, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, Any]]:
    for number, line in lines:
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError):
            raise wrong(path, number, line, "one JSON object", f"write lines such as {form.example}") from None


def _csv_rows(path: str, form: Form, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, Any]]:
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
            if not set(form.columns) <= set(header):
                named = " and ".join(form.columns)
                expected = f"a CSV header with {named}, or JSON lines such as {form.example}"
                raise wrong(path, at[0], at[1], expected, "convert the file to one of these")
        elif len(fields) != len(header):
            raise wrong(path, at[0], at[1], f"{len(header)} fields as in the header", "put texts with commas in quotes")
        else:
            yield at[0], dict(zip(header, fields, strict=True))


def _item(path: str, form: Form, number: int, row: Any) -> Item:
    item = form.item(row) if isinstance(row, dict) else None
    if item is None:
        shown = row if isinstance(row, str) else json.dumps(row)
        raise wrong(path, number, shown, form.example, "correct or remove the line")
    return item


def _encodes(text: str) -> bool:
    """Whether the text has no lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text == text.encode("utf-8", "replace").decode()
