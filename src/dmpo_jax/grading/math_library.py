r"""math-verify, an optional dependency: reading an answer, and comparing two that were read.

Its own time limits are alarms, which reach neither threads nor one long computation, so they are off: the caller bounds the
time (`pool.py`), and what is known to be costly is not read. Of its readers only the one for LaTeX is used, as the other
evaluates text as Python.
"""

import functools
import importlib.util
import logging
import math
import re
from typing import Any

from dmpo_jax.errors import UserError

MAX_TOKENS = 120
MAX_NESTING = 8
MAX_FUNCTIONS = 4
MAX_COUNTED = 5000  # where there are factorials
MAX_DIGITS = 20_000  # of the longest number that may arise
MAX_DIGITS_OF_ROOT = 2000
PRECISION = 100  # digits of members of sets, points and matrices; beyond them two are the same

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[^\s]", re.DOTALL)
_PARTED = re.compile(r"(?<![0-9_^])[0-9]+\s+[0-9]")  # no number, whatever math-verify makes of it
_OPENERS, _CLOSERS = ("{", "(", "[", r"\{"), ("}", ")", "]", r"\}")
_BETWEEN = re.compile(r"[-+*/=<>,&]|\\(?:cdot|times|div|[lg]eq?|in|equiv)")
_FUNCTION = re.compile(r"\\(?:(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|lg|exp)(?![a-z])")
_COSTLY = re.compile(r"\\(?:i?int|oint|sum|prod|lim|operatorname|det|partial)(?![a-z])")


@functools.cache
def require() -> None:
    """Raises `UserError` where math-verify, or what it brings along, is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError(
            "task.reward = \"exact\" of math: math-verify is not installed; run pip install 'dmpo_jax[math]', "
            'or set task.reward = "published"'
        )


def read(text: str) -> list[Any]:
    """What an expression is read as: an object of sympy, where there is one, and a normalised text. Empty if it is costly."""
    if _PARTED.search(text) or not is_tame(text):
        return []
    library, config = _library()
    plain = text.replace("\\$", "").replace("$", "")
    return library.parse(f"${plain}$", (config,), extraction_mode="first_match", parsing_timeout=None)


def same(truth: list[Any], answer: list[Any]) -> bool:
    """Whether math-verify finds two things that were read equal."""
    library, _ = _library()
    return library.verify(
        truth, answer, numeric_precision=PRECISION, allow_set_relation_comp=True, timeout_seconds=None
    )


def is_tame(text: str) -> bool:
    """Whether an expression is short, without powers of powers, many functions, or a number that may become very long.

    Under roots numbers must be far shorter, as sympy factors them.
    """
    tokens = _TOKEN.findall(text)
    if len(tokens) > MAX_TOKENS or len(_FUNCTION.findall(text)) > MAX_FUNCTIONS or _COSTLY.search(text):
        return False
    numbers = [token for token in tokens if token[0].isdigit()]
    if not all(number.isascii() for number in numbers):
        return False
    exponents, has_root = _exponents(tokens)
    has_root |= r"\sqrt" in tokens
    counted = [float(number) for number in numbers if "!" in tokens or r"\binom" in tokens]
    digits = max(map(len, numbers), default=1) * max(exponents, sum(counted))
    return max(counted, default=0) <= MAX_COUNTED and digits <= (MAX_DIGITS_OF_ROOT if has_root else MAX_DIGITS)


def _exponents(tokens: list[str]) -> tuple[float, bool]:
    """The product of all exponents, and whether one is a fraction; infinite where brackets nest deeply, or powers or
    factorials stand over each other.
    """
    inside = [False]  # whether a bracket is an exponent
    product, was_raised, is_root = 1.0, False, False
    for before, token in zip(("", *tokens), tokens, strict=False):
        if token in _OPENERS:
            inside.append(inside[-1] or before == "^")
        elif token in _CLOSERS and len(inside) > 1:
            inside.pop()
        raised = inside[-1] or before == "^"
        if token[0].isdigit() and raised:
            product *= float(token) + 1
        is_root |= raised and (token in ("/", r"\frac") or "." in token)
        if len(inside) > MAX_NESTING + 1 or (token == "^" and (raised or was_raised)):
            return math.inf, is_root
        if token == "!" and (raised or not (before.isdecimal() or (before.isalpha() and len(before) == 1))):
            return math.inf, is_root
        was_raised = not _BETWEEN.fullmatch(token) and (was_raised or token == "^")
    return product, is_root


@functools.cache
def _library():
    import math_verify
    from latex2sympy2_extended import NormalizationConfig

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns that its time limits are off
    # Units are parted before, boxes found before.
    form = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    return math_verify, math_verify.LatexExtractionConfig(boxed_match_priority=-1, normalization_config=form)


def preload() -> None:
    """Import the library, which takes seconds."""
    _library()
