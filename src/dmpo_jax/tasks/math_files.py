r"""MATH as published: problems with worked solutions whose answer stands in a box.

- JSON lines `{"problem": "...", "solution": "... \\boxed{18}"}`; with an `answer`, as in MATH-500, that is the true one
- CSV with the column `problem` and `solution` or `answer` or both, quoted where they hold line breaks

Other keys, such as `level`, `subject` and `type`, are ignored. The answer of a solution is its last complete `\boxed{...}` or
`\fbox{...}`; where there is none, what follows `\boxed ` up to the end of the formula.
"""

import re
from typing import Any

from dmpo_jax.grading.math_answer import last_box
from dmpo_jax.tasks import question_files
from dmpo_jax.tasks.question_files import Form, Item, text_of

SOURCE = (
    "MATH, 7,500 problems to train and 5,000 to test, is at https://github.com/hendrycks/math; MATH-500, of the latter, at "
    "https://github.com/openai/prm800k, in prm800k/math_splits, with the 12,000 others (both MIT licence)"
)

_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+([^{}$\s][^{}$]*)\$")


def read_items(path: str) -> list[tuple[int, Item]]:
    """Read (line number, item) of each problem. Raises `UserError` naming a line that is wrong."""
    return question_files.read_items(path, _FORM)


def _item(row: dict[str, Any]) -> Item | None:
    question, solution, truth = text_of(row, "problem"), text_of(row, "solution") or "", text_of(row, "answer")
    if truth is None and row.get("answer") in (None, ""):
        truth = _boxed(solution)
    return Item(question.strip(), solution.strip(), truth.strip()) if question and truth and truth.strip() else None


def _boxed(solution: str) -> str | None:
    box = last_box(solution)
    if box is None:
        box = next((found[1] for found in reversed(list(_BARE_BOX.finditer(solution)))), None)
    return box


_FORM = Form('{"problem": "...", "solution": "... \\\\boxed{18}"}', SOURCE, ("problem",), _item)
