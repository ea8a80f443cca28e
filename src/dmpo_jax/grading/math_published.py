r"""The published MATH rewards of the d1 family and its evaluation's rule, faults included. Answers are compared as text.

Training reward (diffu-GRPO, wd1 and DMPO share it): the sum of
- `equivalent` 2: the expression that `boxed` finds equals the true answer by `equivalent`;
- `boxed_in_answer`: with the text after the first `<answer>`, up to the next answer tag of either kind, 1 if it holds
  `\boxed`, else 0.75; without that tag 0.5 if the whole text holds `\boxed`, else 0.25. (So DMPO's code. In d1's `"\boxed"` is
  a backspace and "oxed", so that it pays 0.75 and 0.25 only.)

`correct` is what the published evaluation counts: the expression that `boxed` finds, or where it finds none or an empty one,
what stands in the first answer tag, equals the true answer.

Unlike the published code: the text ends before the first end token written out in it; that nothing was found on both sides
is no match.
"""

import re

from dmpo_jax.tasks.text import readable

COMPONENTS = ("reward", "correct", "equivalent", "boxed_in_answer")

_BARE = "\\boxed "
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BRACES = re.compile(r"[{}]")

# In this order; what stands between the two lists is `\text{ ...` with all that follows: a unit.
_BEFORE_UNITS = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)
_UNIT = "\\text{ "
_AFTER_UNITS = (("\\%", ""), (" .", " 0."), ("{.", "{0."))
_ROOT = re.compile(r"\\sqrt([^{])")
_WITHOUT_RADICAND = re.compile(r"\\sqrt(?:\\sqrt|\Z)")
_HALF = r"\frac{1}{2}"


class _Fault(Exception):
    """What stops the published normaliser in the middle."""


def grade(completion: str, truth: str) -> dict[str, float]:
    """The components of one completion. Never raises; linear time."""
    text = readable(completion).decode()
    answer = boxed(text)
    worth = {
        "equivalent": 2.0 * equivalent(text if answer is None else answer, truth),
        "boxed_in_answer": _boxed_in_answer(text),
    }
    return {"reward": sum(worth.values()), "correct": float(correct(text, truth))} | worth


def correct(text: str, truth: str) -> bool:
    """Whether the published evaluation counts a text, which it sees with its end tokens, as right."""
    return equivalent(read(text), truth)


def read(text: str) -> str | None:
    """What the published evaluation takes for the answer of a text; None where it takes nothing."""
    answer = boxed(text)
    if not answer:
        tag = _TAG.search(text)
        answer = tag[1].strip() if tag else answer
    return answer


def boxed(text: str) -> str | None:
    r"""What the published code takes for the answer; None where it takes nothing.

    With `\boxed ` anywhere, what follows the last of these up to a dollar sign. Else from the last `\boxed`, or `\fbox` without
    one, to where the braces that follow balance: its content if it is `\boxed{...}`, all of it if not, None if they never do.
    Without either, the whole text.
    """
    if _BARE in text:
        return text.rpartition(_BARE)[2].partition("$")[0]
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return text
    depth = 0
    for brace in _BRACES.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0 and brace[0] == "}":
            found = text[start : brace.end()]
            return found[len("\\boxed{") : -1] if found.startswith("\\boxed{") else found
    return None


def _boxed_in_answer(text: str) -> float:
    before, tag, after = text.partition("<answer>")
    if tag:
        inside = after.partition("<answer>")[0].partition("</answer>")[0]
        return 1.0 if "\\boxed" in inside else 0.75
    return 0.5 if "\\boxed" in before else 0.25


def equivalent(answer: str | None, truth: str | None) -> bool:
    r"""Whether two expressions are the same after `normalised`; as they are where that stops at a fault of either.

    So `\sqrt` without a radicand equals nothing but itself. None equals nothing.
    """
    if answer is None or truth is None:
        return False
    try:
        return normalised(answer) == normalised(truth)
    except _Fault:
        return answer == truth


def normalised(text: str) -> str:
    """The spelling that the published code compares (the rules of Hendrycks et al. 2021).

    Raises an error of this module where the published code would raise one.
    """
    for form, plain in _BEFORE_UNITS:
        text = text.replace(form, plain)
    if text.count(_UNIT) > 1:
        raise _Fault
    text = text.partition(_UNIT)[0]
    for form, plain in _AFTER_UNITS:
        text = text.replace(form, plain)
    if text.startswith("."):
        text = f"0{text}"
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    if _WITHOUT_RADICAND.search(text):
        raise _Fault
    text = _braced_fractions(_ROOT.sub(r"\\sqrt{\1}", text).replace(" ", ""))
    return _simple_fraction(_HALF if text == "0.5" else text)


def _braced_fractions(text: str) -> str:
    r"""Braces round the one character of \frac12 and \frac1{72}; nothing at all where a fraction has one character only."""
    head, *tails = text.split("\\frac")
    parts = [head]
    for tail in tails:
        if not tail:
            raise _Fault
        if tail[0] != "{":
            if len(tail) == 1:
                # The published code gives up here, and meets no fault that may come later.
                return text
            below = tail[1:] if tail[1] == "{" else f"{{{tail[1]}}}{tail[2:]}"
            tail = f"{{{tail[0]}}}{below}"
        parts.append(tail)
    return "\\frac".join(parts)


def _simple_fraction(text: str) -> str:
    parts = text.split("/")
    if len(parts) != 2:
        return text
    try:
        above, below = map(int, parts)
    except ValueError:
        raise _Fault from None
    return f"\\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text
