r"""Asking math-verify about true answers in forms that are not read here, such as \max(3, 5) or 2 \in \mathbb{Z}.

It is an optional dependency. Its own time limits are alarms, which reach neither threads nor one long computation, so they are
off: the caller bounds the time, and what is known to be costly is refused here.
"""

import functools
import importlib.util
import logging

from dmpo_jax.errors import UserError
from dmpo_jax.grading import math_units
from dmpo_jax.grading.math_structure import Tokens
from dmpo_jax.grading.math_text import is_number

MAX_TOKENS = 50
MAX_NESTING = 6
MAX_FUNCTIONS = 3
MAX_DIGITS = 12
MAX_EXPONENT = 10_000  # of all exponents the product

_OPENERS, _CLOSERS = ("{", "(", "["), ("}", ")", "]")
_BETWEEN = ("+", "-", "*", "/", "=", "<", ">", ",", "&", r"\cdot", r"\times", r"\le", r"\ge", r"\in", r"\equiv")
_FUNCTIONS = tuple(f"\\{name}" for name in (*math_units.FUNCTIONS - {"pi", "frac", "sqrt"}, "lg"))
_COSTLY = (r"\int", r"\sum", r"\prod", r"\lim", r"\binom", r"\operatorname", r"\det")


@functools.cache
def require() -> None:
    """Raises `UserError` where math-verify, or what it brings along, is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(
            "task.reward = \"exact\" of math: math-verify is not installed; run pip install 'dmpo_jax[math]', "
            'or set task.reward = "published"'
        )


def same(truth: Tokens, answer: Tokens) -> bool:
    """Whether math-verify finds two expressions equal. False for an answer that may cost much, or where it fails."""
    if not (is_tame(truth) and is_tame(answer)):
        return False
    library, config = _library()
    one, other = (
        library.parse(
            f"${' '.join(part).replace(chr(92) + 'word', chr(92) + 'text')}$",
            (config,),
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
        for part in (truth, answer)
    )
    return bool(one and other) and library.verify(one[0], other[0], timeout_seconds=None)


def is_tame(tokens: Tokens) -> bool:
    """Whether an expression is short, without long numbers, powers of powers, large factorials, or many functions."""
    if len(tokens) > MAX_TOKENS or sum(map(tokens.count, _FUNCTIONS)) > MAX_FUNCTIONS or set(tokens) & set(_COSTLY):
        return False
    inside, exponents, was_raised = (
        [False],
        1,
        False,
    )  # whether a bracket is an exponent; whether what stands before is one
    for before, token in zip(("", *tokens), tokens, strict=False):
        if token in _OPENERS:
            inside.append(inside[-1] or before == "^")
        elif token in _CLOSERS and len(inside) > 1:
            inside.pop()
        raised = inside[-1] or before == "^"
        if is_number(token):
            exponents *= int(float(token[:MAX_DIGITS])) + 1 if raised else 1
        too_large = (
            exponents > MAX_EXPONENT or (is_number(token) and len(token) > MAX_DIGITS) or len(inside) > MAX_NESTING + 1
        )
        if too_large or (token == "^" and (raised or was_raised)):
            return False
        if token == "!" and (raised or not before.isdecimal() or len(before) > 3):
            return False
        was_raised = token not in _BETWEEN and (was_raised or token == "^")
    return True


@functools.cache
def _library():
    import math_verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns that its time limits are off
    return math_verify, math_verify.LatexExtractionConfig(boxed_match_priority=-1)


def preload() -> None:
    """Import the library, which takes seconds."""
    _library()
