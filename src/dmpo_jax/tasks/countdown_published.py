r"""The published countdown rules of the d1 family: its training reward and its evaluation. On the host only.

Training reward (diffu-GRPO, wd1 and DMPO share it): 0 without a complete answer tag; 0.1 with one, whatever is in it; 1 where
the digit runs of the last answer are the given numbers, each as often as it is given, and Python's value of it is within 1e-5
of the target. So `2**3`, `7//2` and `1.5*4` from 1, 5 and 4 pay, and `3+4 = 7` does not.

Evaluation. What is graded is, in this order,
- where the text holds `\boxed ` (with a blank): what follows the last one, up to the next `$`;
- the last `\boxed` or, without one, the last `\fbox`: its content up to the brace that closes it. What is not written
  `\boxed{...}` stays whole;
- where that box has no end: the first complete answer tag, else the whole text;
- where there is no box at all: the whole text, tags and all. An answer tag is never looked for then.
`\div`, `\times` and `\cdot` become operators. Of the first `expression = number` in it the expression alone is graded, so an
equation in the working pays whatever the answer is. Numbers and value are judged as in the training reward.

Unlike the published code, `python_arithmetic.py` computes the value, within its bounds; and training ends a text before the
first end token written out in it. The evaluation reads the text to its end.
"""

import re
from typing import NamedTuple

import numpy as np

from dmpo_jax.tasks import python_arithmetic
from dmpo_jax.tasks.task import Features
from dmpo_jax.tasks.text import readable

TOLERANCE = 1e-5

# Interfaces of published models: what the d1 family sends in training and in evaluation, to the letter.
PROMPT = (
    "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n\n"
    "Using only the numbers {numbers}, create an arithmetic expression that evaluates to exactly {target}. You must use all "
    "numbers from the list, and each number must be used exactly once. You may use the operations +, -, *, and / as needed. "
    "After reasoning, provide only your final expression inside <answer></answer> tags without including an equals sign or "
    "the target number. For example, if the numbers are [2, 3, 4] and the target is 5, a valid answer is: "
    "<answer>\n2*4-3\n</answer>"
)
PROMPT_EVALUATION = (
    "Using only the provided numbers, create an arithmetic expression that evaluates to exactly the provided target number. "
    "You may use the operations +, -, *, and / as needed, but each number must be used exactly once. Think step-by-step. "
    "After reasoning, provide only your final expression inside \\boxed{{}} tags without including an equals sign or the "
    "target number. For example: \\boxed{{a + b * c}}"
    "Respond in the following format:\n<reasoning>\nYour reasoning here\n</reasoning>\n"
    "<answer>\n\\boxed{{...}}\n</answer>\n\nNumbers: {numbers}\nTarget: {target}"
)

_OPEN, _CLOSE = "<answer>", "</answer>"
_BARE, _BOX, _FRAME = "\\boxed ", "\\boxed", "\\fbox"
_BRACES = re.compile("[{}]")
_DIGITS = re.compile(r"\d+")
_RIGHT_SIDE = re.compile("=[0-9. ]")
_LEFT_SIDE = frozenset("0123456789+-*/() ")


class Graded(NamedTuple):
    """What the published evaluation grades: where it is (box, tag or text), its content, and the expression in it."""

    place: str
    content: str
    expression: str


def grade_text(completion: str, features: Features) -> dict[str, float]:
    """The training reward of one completion."""
    text = readable(completion).decode("utf-8", "replace")
    return {"reward": training_reward(text, *_given(features))}


def training_reward(text: str, numbers: list[int], target: int) -> float:
    """0, 0.1 or 1 for a text and the numbers and target of its question. Linear time."""
    answer, stop = None, 0
    while (start := text.find(_OPEN, stop)) >= 0 and (close := text.find(_CLOSE, start)) >= 0:
        answer, stop = text[start + len(_OPEN) : close], close + len(_CLOSE)
    if answer is None:
        return 0.0
    return 1.0 if solves(answer, numbers, target) else 0.1


def evaluate(completion: str, features: Features) -> bool:
    """Whether the published evaluation counts a completion as right. Linear time."""
    return solves(graded(completion).expression, *_given(features))


def solves(expression: str, numbers: list[int], target: int) -> bool:
    """Whether an expression's digit runs are the numbers and Python's value of it is near the target."""
    found = _DIGITS.findall(expression)
    if len(found) != len(numbers):
        return False
    try:
        same = sorted(map(int, found)) == sorted(numbers)
    except ValueError:  # a number of thousands of digits
        return False
    value = python_arithmetic.evaluate(expression) if same else None
    try:
        return value is not None and abs(value - target) < TOLERANCE
    except OverflowError:  # a complex number near the largest
        return False


def graded(text: str) -> Graded:
    """What of a text the published evaluation grades. Linear time."""
    place, content = _located(text)
    formula = plain(content)
    for sign in _RIGHT_SIDE.finditer(formula):
        start = end = sign.start()
        while start and formula[start - 1] in _LEFT_SIDE:
            start -= 1
        if start < end:
            return Graded(place, content, formula[start:end].strip())
    return Graded(place, content, formula)


def plain(content: str) -> str:
    """A content with the LaTeX operators that the published evaluation knows turned into Python's."""
    return content.replace(r"\div", "/").replace(r"\times", "*").replace(r"\cdot", "*")


def _located(text: str) -> tuple[str, str]:
    if _BARE in text:
        return "box", text.rpartition(_BARE)[2].partition("$")[0]
    start = text.rfind(_BOX)
    if start < 0:
        start = text.rfind(_FRAME)
    if start < 0:
        return "text", text
    end = _closing_brace(text, start)
    if end >= 0:
        box = text[start : end + 1]
        return "box", box[len(_BOX) + 1 : -1] if box.startswith(_BOX + "{") else box
    start = text.find(_OPEN)
    stop = text.find(_CLOSE, start) if start >= 0 else -1
    return ("tag", text[start + len(_OPEN) : stop].strip()) if stop >= 0 else ("text", text)


def _closing_brace(text: str, start: int) -> int:
    """Where the braces from `start` on are balanced for the first time; -1 where they never are."""
    open_ones = 0
    for brace in _BRACES.finditer(text, start):
        open_ones += 1 if brace[0] == "{" else -1
        if brace[0] == "}" and open_ones == 0:
            return brace.start()
    return -1


def _given(features: Features) -> tuple[list[int], int]:
    return np.asarray(features["numbers"])[: int(features["count"])].tolist(), int(features["target"])
