"""Countdown: reach a target with + - * / from given numbers, each used exactly once.

Grading. The answer (see `text.py` for where it is) must be an expression in the language of `expression.py`.
`format` is 1 where it is one. `reward` is 1 where besides the numbers in it are the given ones, each as often
as it is given, nothing is divided by zero, its exact rational value is the target, and a trailing `= N` is
true.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dmpo_jax.errors import UserError
from dmpo_jax.tasks import countdown_published, expression, expression_device
from dmpo_jax.tasks.bytes import answer_span, unwrap
from dmpo_jax.tasks.countdown_files import read_items
from dmpo_jax.tasks.countdown_items import draw_items, solve, wrong_expression
from dmpo_jax.tasks.files import wrong
from dmpo_jax.tasks.task import SPLITS, Example, Features, Task, TaskConfig, check_graded, check_split
from dmpo_jax.tasks.text import answer_of

COMPONENTS = ("reward", "format")
_INT32 = 2**31

_INSTRUCTIONS = """Reach {target} with the numbers {numbers}.
Write an arithmetic expression that equals {target} and uses each of these numbers exactly once. Only
+ - * / and brackets are allowed. Reason first, in words. Then give the expression alone, like this:
<answer>(1+2)*3</answer>"""


_PUBLISHED = {
    "published": countdown_published.PROMPT,
    "published_evaluation": countdown_published.PROMPT_EVALUATION,
}


def features(truth: dict[str, Any], width: int = 0) -> Features:
    """Arrays for the graders from `{"numbers": [3, 4], "target": 7}`; `width` pads the numbers with zeros.

    Raises `UserError` where the device could not evaluate expressions of these numbers exactly in int32.
    """
    numbers, target = [int(number) for number in truth["numbers"]], int(truth["target"])
    bound = 2 ** max(len(numbers) - 1, 0)
    for number in numbers:
        bound *= max(number, 1)
    if not numbers or min(numbers) < 0 or bound >= _INT32 or abs(target) >= _INT32:
        raise UserError(
            f"numbers {numbers} with target {target}: expected whole numbers from 0 whose product times "
            f"2^(count-1) is below 2^31 and a target below 2^31; use smaller or fewer numbers"
        )
    padded = numbers + [0] * (width - len(numbers))
    values = {"numbers": padded, "count": len(numbers), "target": target}
    return {key: np.array(value, np.int32) for key, value in values.items()}


def examples(config: TaskConfig, split: str) -> list[Example]:
    """The examples of a split: those of its file where one is named, else three-number items.

    No item, as sorted numbers and target, is in two generated splits, whatever the seeds.
    """
    check_split(split)
    path = getattr(config, f"{split}_file")
    if path:
        return read(path, config)
    rng = np.random.default_rng([config.seed, SPLITS.index(split)])
    return _examples(draw_items(split, getattr(config, f"{split}_size"), rng), config)


def read(path: str, config: TaskConfig) -> list[Example]:
    """Read a file in one of the forms of `countdown_files.py`.

    Raises `UserError` with the line that is malformed, mixes forms, has no solution, or exceeds exact int32
    arithmetic.
    """
    solved = []
    for line, (numbers, target) in read_items(path):
        try:
            features({"numbers": numbers, "target": target})
        except UserError as error:
            raise UserError(f"{path}, line {line}: {error}") from None
        expression = solve(numbers, target)
        if expression is None:
            found = f"{numbers} for {target}"
            raise wrong(path, line, found, "numbers that reach the target, each used once", "remove the line")
        solved.append((numbers, target, expression))
    return _examples(solved, config)


def _examples(items: list[tuple[list[int], int, str]], config: TaskConfig) -> list[Example]:
    width = max(len(numbers) for numbers, _, _ in items)
    careless = np.random.default_rng([config.seed, len(SPLITS)]).random(len(items)) < config.careless
    result = []
    for index, (numbers, target, truth) in enumerate(items):
        listed = ",".join(map(str, numbers))
        if config.prompt == "compact":
            prompt = f"{listed}:{target}="
        elif config.prompt == "instruct":
            prompt = _INSTRUCTIONS.format(numbers=listed.replace(",", ", "), target=target)
        else:
            prompt = _PUBLISHED[config.prompt].format(numbers=numbers, target=target)
        shown = truth
        if careless[index]:
            rng = np.random.default_rng([config.seed, len(SPLITS), index])
            shown = wrong_expression(numbers, target, rng) or truth
        arrays = features({"numbers": numbers, "target": target}, width)
        result.append(Example(prompt, f"<answer>{shown}</answer>", truth, arrays))
    return result


def grade_text(completion: str, features: Features) -> dict[str, float]:
    """Grade one completion on the host."""
    parsed = expression.parse(answer_of(completion))
    if parsed is None:
        return {"reward": 0.0, "format": 0.0}
    given = np.asarray(features["numbers"])[: int(features["count"])].tolist()
    target = int(features["target"])
    right = (
        sorted(parsed.numbers) == sorted(given)
        and parsed.denominator != 0
        and parsed.numerator == target * parsed.denominator
        and parsed.claim in (None, target)
    )
    return {"reward": float(right), "format": 1.0}


def grade_bytes(stream: jax.Array, length: jax.Array, features: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Grade uint8[B, W] texts of int32[B] bytes on the device: float32[B] per component.

    Features: `numbers` int32[B, K] of which the first `count` int32[B] are given, and `target` int32[B].
    """
    parsed = expression_device.parse(*unwrap(*answer_span(stream, length)))
    target = features["target"]
    # By division, since the product of target and denominator may exceed int32.
    divisor = jnp.where(parsed.denominator == 0, 1, parsed.denominator)
    equal = (lax.rem(parsed.numerator, divisor) == 0) & (lax.div(parsed.numerator, divisor) == target)
    right = (
        parsed.valid
        & _uses_each_once(parsed.is_number, parsed.number, features["numbers"], features["count"])
        & ~parsed.undefined
        & equal
        & (~parsed.has_claim | (parsed.claim == target))
    )
    return {"reward": right.astype(jnp.float32), "format": parsed.valid.astype(jnp.float32)}


def _uses_each_once(is_number: jax.Array, number: jax.Array, given: jax.Array, count: jax.Array) -> jax.Array:
    """Whether the marked numbers [B, S] are the first `count` of `given` [B, K], in any order: bool[B]."""
    real = jnp.arange(given.shape[1]) < count[:, None]
    right = jnp.sum(is_number, axis=1) == count
    for index in range(given.shape[1]):
        wanted = given[:, index, None]
        needed = jnp.sum(real & (given == wanted), axis=1)
        used = jnp.sum(is_number & (number == wanted), axis=1)
        right &= (used == needed) | ~real[:, index]
    return right


def summarize(rows: list[dict[str, Any]], examples: list[Example]) -> dict[str, Any]:
    """Figures of one graded answer to each example.

    `accuracy` and `exact` (the same), `format`, and `solvable_by_sums` (with + and - alone).

    Raises `UserError` where the numbers of rows and examples differ or are zero.
    """
    check_graded(rows, examples)
    numbers = np.stack([example.features["numbers"] for example in examples]).astype(np.int64)
    target = np.array([example.features["target"] for example in examples])
    sums = numbers[:, :1] * 0
    for column in numbers.T[:, :, None]:
        sums = np.concatenate([sums + column, sums - column], axis=1)
    exact = float(np.mean([row["reward"] for row in rows]))
    return {
        "accuracy": exact,
        "exact": exact,
        "format": float(np.mean([row["format"] for row in rows])),
        "solvable_by_sums": float((sums == target[:, None]).any(axis=1).mean()),
    }


TASK = Task("countdown", COMPONENTS, features, examples, read, grade_text, grade_bytes, summarize)
