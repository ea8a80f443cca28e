"""Files of answers that are graded anew, in two forms told apart by their content.

- d1's: one JSON object whose `generations` are objects with `question`, `generations` (the completion, end tokens and all)
  and `ground_truth`: `[[49, 55, 53], 51]` for countdown, the number for GSM8K (null where d1 failed to read it), the answer
  for MATH, the 16 digits of the solution for sudoku;
- those of `dmpo eval`: JSON lines with `prompt`, `completion` and `truth`, and `ended` where an end token was taken off.

Other keys are ignored. Countdown's numbers and sudoku's puzzle, where the truth does not hold them, are read in the question.
"""

import json
import re
from decimal import Decimal
from typing import Any, NamedTuple

from dmpo_jax.errors import UserError, shown
from dmpo_jax.evaluation.verdicts import with_end
from dmpo_jax.grading.math_answer import last_box
from dmpo_jax.inputs import read_regular
from dmpo_jax.tasks import countdown, expression, gsm8k, math, sudoku
from dmpo_jax.tasks.sudoku_grids import is_grid
from dmpo_jax.tasks.task import Features

MAX_BYTES = 64 * 2**20  # of a file
MAX_ITEMS = 100_000  # in a file
MAX_NUMBERS = 6  # of a countdown question
MAX_CHARACTERS = 2**17  # of a question or a completion

_FORMS = (
    '{"generations": [{"question": ..., "generations": ..., "ground_truth": ...}]}, or lines of dmpo eval\'s FILE.jsonl'
)
_SETTINGS = ("gen_length", "diffusion_steps", "block_length")
_NUMBERS = re.compile(r"Numbers: \[([0-9, ]+)\]", re.IGNORECASE)
_TARGET = re.compile(r"Target: ([0-9]{1,9})(?![0-9])", re.IGNORECASE)
_PUZZLE = re.compile(r"(?<!\d)([0-4]{4}) ?([0-4]{4}) ?([0-4]{4}) ?([0-4]{4})(?!\d)")


class Item(NamedTuple):
    """One answer: where it stands, its text with end tokens, the truth as text and as features; None where it is unknown."""

    file: str
    number: int  # in the file, from 1
    question: str
    completion: str
    truth: str
    features: Features | None


class Generations(NamedTuple):
    """The answers of a file, and the settings of d1's decoding that it states."""

    items: list[Item]
    settings: dict[str, int]


def read_generations(path: str, task: str) -> Generations:
    """Read and check a file of answers to one of `READERS`. Raises UserError naming the item that is wrong."""
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path!r}: cannot be read ({error.strerror}); name an existing file of answers") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; save the file as UTF-8") from None
    whole = _parsed(text)
    if isinstance(whole, dict) and "generations" in whole:
        rows = whole["generations"]
        if not isinstance(rows, list):
            raise UserError(f"{path}: generations = {shown(rows)}: expected a list; give {_FORMS}")
        keys, settings = ("question", "generations", "ground_truth"), _settings(whole)
    else:
        rows = [(number, _parsed(line)) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        bad = next((number for number, row in rows if not isinstance(row, dict)), None)
        if bad is not None:
            raise UserError(f"{path}, line {bad}: not a JSON object; give {_FORMS}")
        rows, keys, settings = [row for _, row in rows], ("prompt", "completion", "truth"), {}
    if not 1 <= len(rows) <= MAX_ITEMS:
        raise UserError(f"{path}: holds {len(rows)} answers, expected 1 to {MAX_ITEMS}; name another file, or split it")
    return Generations([_item(path, number, row, keys, task) for number, row in enumerate(rows, 1)], settings)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _settings(whole: dict[str, Any]) -> dict[str, int]:
    return {key: whole[key] for key in _SETTINGS if type(whole.get(key)) is int and 0 < whole[key] < 2**31}


def _item(path: str, number: int, row: Any, keys: tuple[str, str, str], task: str) -> Item:
    def wrong(key: str, value: Any, expected: str) -> UserError:
        return UserError(
            f"{path}, item {number}: {key} = {shown(value)}: expected {expected}; correct or remove the item"
        )

    if not isinstance(row, dict):
        raise wrong("the item", row, f"an object with {', '.join(keys)}")
    texts = []
    for key in keys[:2]:
        value = row.get(key)
        if not isinstance(value, str) or len(value) > MAX_CHARACTERS:
            raise wrong(key, value, f"a text of at most {MAX_CHARACTERS} characters")
        texts.append(value.encode("utf-8", "replace").decode())  # JSON can spell lone surrogates, UTF-8 cannot
    ended = row.get("ended", False) if keys[0] == "prompt" else False
    if type(ended) is not bool:
        raise wrong("ended", ended, "true or false")
    truth = row.get(keys[2])
    try:
        found = READERS[task](texts[0], truth)
    except UserError as error:
        raise UserError(f"{path}, item {number}: {error}") from None
    if found is None:
        raise wrong(keys[2], truth, _EXPECTED[task])
    return Item(path, number, texts[0], with_end(texts[1], ended), *found)


# ---- the truth of each task: (as text, as features), None where it has no known form


def _countdown(question: str, truth: Any) -> tuple[str, Features] | None:
    if isinstance(truth, list) and len(truth) == 2:
        numbers, target = truth
    elif isinstance(truth, str) and len(truth) <= 256:
        solution = expression.parse(truth.encode("utf-8", "replace"))
        if solution is None or not solution.denominator or solution.numerator % solution.denominator:
            return None
        numbers, target = solution.numbers, solution.numerator // solution.denominator
    else:
        listed, stated = _NUMBERS.search(question), _TARGET.search(question)
        if not (listed and stated) or len(listed[1]) > 256:
            return None
        parts = [part.strip() for part in listed[1].split(",")]
        if not all(part.isdigit() and len(part) <= 9 for part in parts):
            return None
        numbers, target = [int(part) for part in parts], int(stated[1])
    if not isinstance(numbers, list) or len(numbers) > MAX_NUMBERS:
        return None
    if any(type(value) is not int or abs(value) >= 2**31 for value in (*numbers, target)):
        return None
    features = countdown.features({"numbers": numbers, "target": target}, MAX_NUMBERS)  # of one width, to be stacked
    return f"{target} from {', '.join(map(str, numbers))}", features


def _gsm8k(question: str, truth: Any) -> tuple[str, Features | None] | None:
    if truth is None:
        return "", None
    if type(truth) in (int, float) and -1e18 < truth < 1e18:
        truth = f"{Decimal(repr(truth)):f}"
    return (truth, gsm8k.features(truth)) if isinstance(truth, str) else None


def _math(question: str, truth: Any) -> tuple[str, Features] | None:
    if not isinstance(truth, str) or not truth.strip():
        return None
    answer = last_box(truth) or truth.strip()
    return answer, math.features(answer)


def _sudoku(question: str, truth: Any) -> tuple[str, Features] | None:
    found = _PUZZLE.search(question)
    if not found or "0" not in found[0]:
        raise UserError(
            f"question {shown(question)}: expected a puzzle of 16 digits from 0 (a blank) to 4; correct or remove the item"
        )
    if not isinstance(truth, str) or not re.fullmatch("[1-4]{16}", truth):
        return None
    features = sudoku.features({"puzzle": "".join(found.groups()), "solution": truth})
    puzzle, solution = features["puzzle"], features["solution"]
    return (truth, features) if is_grid(solution) and ((puzzle == 0) | (puzzle == solution)).all() else None


READERS = {"countdown": _countdown, "gsm8k": _gsm8k, "math": _math, "sudoku": _sudoku}
_EXPECTED = {
    "countdown": f"[[49, 55, 53], 51] with at most {MAX_NUMBERS} numbers, an expression such as 49+55-53, or a question with "
    "Numbers: [...] and Target: ...",
    "gsm8k": "a number, its text, or null",
    "math": "the answer, or a solution that ends in \\boxed{...}",
    "sudoku": "the 16 digits of a grid that keeps the puzzle's clues",
}
