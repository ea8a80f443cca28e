"""Published sudoku files: CSV with the header `Puzzle,Solution` and 16 digits each, 0 for a blank."""

import csv

import numpy as np

from dmpo_jax.errors import UserError
from dmpo_jax.tasks.files import read_lines, wrong
from dmpo_jax.tasks.sudoku_grids import is_grid


def read_puzzles(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Read and check a file: (puzzles, solutions), both int32[N, 16].

    Raises `UserError` with the line where the header, a row's form, or the solution (rules, clues) is wrong.
    """
    numbers, digits = [], []
    lines = read_lines(path)
    number, line = next(lines, (1, ""))
    if [field.lower() for field in _fields(path, number, line)] != ["puzzle", "solution"]:
        raise wrong(path, number, line, "the header Puzzle,Solution", "add it as the first line")
    for number, line in lines:
        fields = _fields(path, number, line)
        if len(fields) != 2:
            raise wrong(path, number, line, "two fields, Puzzle,Solution", "remove other columns")
        for field, allowed in zip(fields, ("01234", "1234"), strict=True):
            _check(path, number, field, allowed)
        numbers.append(number)
        digits.append(fields[0] + fields[1])
    if not digits:
        raise UserError(f"{path}: holds no puzzles, expected lines of Puzzle,Solution; name another file")
    both = np.frombuffer("".join(digits).encode(), np.uint8).reshape(-1, 2, 16).astype(np.int32) - ord("0")
    puzzles, solutions = both[:, 0], both[:, 1]
    for bad, cells, expected in (
        (~is_grid(solutions), solutions, "a solution whose rows, columns and boxes hold 1 to 4 once each"),
        (
            ((puzzles != 0) & (puzzles != solutions)).any(axis=1),
            puzzles,
            "a puzzle whose clues its solution keeps",
        ),
        ((puzzles != 0).all(axis=1), puzzles, "a puzzle with at least one blank (0)"),
    ):
        if bad.any():
            row = int(np.argmax(bad))
            raise wrong(path, numbers[row], "".join(map(str, cells[row])), expected, "correct or remove the line")
    return puzzles, solutions


def _fields(path: str, number: int, line: str) -> list[str]:
    try:
        return [field.strip() for row in csv.reader([line], strict=True) for field in row]
    except csv.Error:
        raise wrong(path, number, line, "comma-separated values", "check its quotes") from None


def _check(path: str, number: int, field: str, allowed: str) -> None:
    """Raise the error for a puzzle or solution that is not 16 of the allowed digits."""
    if len(field) == 16 and not set(field) - set(allowed):
        return
    remedy = "correct the line"
    if len(field) < 16:
        remedy = "a spreadsheet may have dropped leading zeros: export both columns as text"
    elif "." in field or field.endswith("0"):
        remedy = "a spreadsheet may have rounded it to 15 digits: export both columns as text"
    expected = f"16 digits from {allowed[0]} to {allowed[-1]}"
    raise wrong(
        path,
        number,
        field,
        f"{expected}, not {len(field)} characters" if len(field) != 16 else expected,
        remedy,
    )
