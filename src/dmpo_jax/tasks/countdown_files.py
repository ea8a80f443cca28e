"""Published countdown files, told apart by their content; one file holds one form.

- d1:    JSON lines `{"input": "30,100,93", "output": "23"}`
- Dream: JSON lines `{"input": "15,44,79,50", "output": "44-15=29,79-29=50"}`; the last input number is the
  target
- nums:  JSON lines `{"nums": [30, 100, 93], "target": 23}`
- csv:   CSV with the columns `nums` (`"[30, 100, 93]"` or `30 100 93`) and `target`
"""

import csv
import json
import re
from typing import Any

from dmpo_jax.errors import UserError
from dmpo_jax.tasks.files import read_lines, wrong

MOST_NUMBERS = 4
_INTEGER = r"\d{1,9}"
_STEP = rf"{_INTEGER}\s*[-+*/]\s*{_INTEGER}\s*=\s*{_INTEGER}"
_STEPS = re.compile(rf"{_STEP}(\s*,\s*{_STEP})*", re.ASCII)
_LIST = re.compile(rf"\[?\s*{_INTEGER}((\s*,\s*|\s+){_INTEGER})*\s*\]?", re.ASCII)
_FORMS = '{"input": "30,100,93", "output": "23"} or {"nums": [30, 100, 93], "target": 23}'

Item = tuple[list[int], int]


def read_items(path: str) -> list[tuple[int, Item]]:
    """Read (line number, (numbers, target)) of each item. Raises `UserError` naming a line that is wrong."""
    lines = list(read_lines(path))
    if lines and not lines[0][1].startswith("{"):
        items = _read_csv(path, lines)
    else:
        items = _read_json(path, lines)
    if not items:
        raise UserError(f"{path}: holds no items, expected lines such as {_FORMS}; name another file")
    for number, (numbers, target) in items:
        if not 2 <= len(numbers) <= MOST_NUMBERS:
            raise wrong(path, number, numbers, f"2 to {MOST_NUMBERS} numbers", "remove the line")
        for value in (*numbers, target):
            if not 1 <= value < 10**9:
                raise wrong(path, number, value, "whole numbers from 1 to 999999999", "correct or remove the line")
    return items


def _read_json(path: str, lines: list[tuple[int, str]]) -> list[tuple[int, Item]]:
    items, form = [], ""
    for number, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise wrong(path, number, line, "one JSON object", f"write lines such as {_FORMS}") from None
        here, item = _item(row)
        if item is None:
            raise wrong(path, number, line, _FORMS, "correct or remove the line")
        if form and here != form:
            raise wrong(
                path,
                number,
                line,
                f"the {form} form of line {lines[0][0]}, not the {here} form",
                "put each form in its own file",
            )
        form = here
        items.append((number, item))
    return items


def _item(row: Any) -> tuple[str, Item | None]:
    """The form of a JSON row and its item; None where it has no known form."""
    if not isinstance(row, dict):
        return "", None
    if "nums" in row and "target" in row:
        nums, target = row["nums"], row["target"]
        if isinstance(nums, list) and all(type(value) is int for value in (*nums, target)):
            return "nums", (nums, target)
        return "", None
    numbers, output = _numbers(row.get("input")), row.get("output")
    if numbers is None:
        return "", None
    if type(output) is int:
        return "d1", (numbers, output)
    if isinstance(output, str) and re.fullmatch(rf"\s*{_INTEGER}\s*", output, re.ASCII):
        return "d1", (numbers, int(output))
    if isinstance(output, str) and _STEPS.fullmatch(output.strip()):
        return "Dream", (numbers[:-1], numbers[-1])
    return "", None


def _read_csv(path: str, lines: list[tuple[int, str]]) -> list[tuple[int, Item]]:
    items: list[tuple[int, Item]] = []
    header: list[str] = []
    for number, line in lines:
        try:
            fields = [field.strip() for row in csv.reader([line], strict=True) for field in row]
        except csv.Error:
            raise wrong(path, number, line, "comma-separated values", "check its quotes") from None
        if not header:
            header = [field.lower() for field in fields]
            if not {"nums", "target"} <= set(header):
                raise wrong(
                    path,
                    number,
                    line,
                    f"a CSV header with nums and target, or JSON lines such as {_FORMS}",
                    "convert the file to one of these",
                )
            continue
        if len(fields) != len(header):
            raise wrong(path, number, line, f"{len(header)} fields as in the header", 'put lists in quotes: "[1, 2]"')
        numbers, target = (_numbers(fields[header.index(key)]) for key in ("nums", "target"))
        if numbers is None or target is None or len(target) != 1:
            raise wrong(path, number, line, 'a row such as "[30, 100, 93]",23', "correct or remove the line")
        items.append((number, (numbers, target[0])))
    return items


def _numbers(text: Any) -> list[int] | None:
    if not isinstance(text, str) or not _LIST.fullmatch(text.strip()):
        return None
    return [int(value) for value in re.findall(r"\d+", text)]
