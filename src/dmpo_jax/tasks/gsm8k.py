"""GSM8K: grade-school word problems whose answer is one number.

Grading. `number_text.py` says which number a completion gives as its answer. `correct` is 1 where it is exactly the true one;
`format` is 1 where an answer tag holds a number, right or wrong. `reward` is (1 - s) correct + s format with the share
s = `task.format_share`, 0 if not set. With `task.reward = "published"` rewards and `correct` are those of `gsm8k_published.py`.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmpo_jax.errors import UserError
from dmpo_jax.tasks import gsm8k_published, number_device, number_text
from dmpo_jax.tasks.gsm8k_files import SOURCE, read_items
from dmpo_jax.tasks.gsm8k_published import TRUTH_BYTES
from dmpo_jax.tasks.question_files import Item, as_examples, split_items
from dmpo_jax.tasks.task import Example, Features, Task, TaskConfig, check_graded
from dmpo_jax.tasks.text import readable

COMPONENTS = ("reward", "correct", "format")
MAX_DIGITS = 18

_INSTRUCTIONS = """{question}
Reason first, step by step, in words. Then give the answer as a number alone, like this:
<answer>42</answer>"""

# Interfaces of published models: what the d1 family sends in training and in evaluation, to the letter.
_PUBLISHED = """
Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>


{question}"""
_PUBLISHED_EVALUATION = (
    "You are a math expert. You will be given a question to solve. Solve it step by step. "
    "Wrap the final answer in a \\boxed{{}}. \n"
    "Respond in the following format:\n<reasoning>\nYour reasoning here\n</reasoning>\n"
    "<answer>\n\\boxed{{...}}\n</answer>\n\n{question}"
)
_PROMPTS = {
    "compact": "{question}\n",
    "instruct": _INSTRUCTIONS,
    "published": _PUBLISHED,
    "published_evaluation": _PUBLISHED_EVALUATION,
}
_CALCULATION = re.compile(r"<<[^<>]*>>")


def features(truth: str | dict[str, Any]) -> Features:
    """Arrays for the graders from the true number as text, or `{"answer": "... #### 1,234"}`; a worked answer is allowed.

    `negative` int32[], `digits` int32[MAX_DIGITS] filled up with -1, `exponent` int32[] (of ten), and `text`
    int32[TRUTH_BYTES], the number as it is written. Raises `UserError` where that is no number or too long.
    """
    text = str(truth["answer"] if isinstance(truth, dict) else truth).rpartition("####")[2].strip()
    raw = text.encode("utf-8", "replace")
    number = number_text.read(raw) if len(raw) <= TRUTH_BYTES else None
    if number is None or len(number.digits) > MAX_DIGITS:
        raise UserError(
            f"true answer {text[:80]!r}: expected one number such as 18, -2.5 or 1,000 of at most {MAX_DIGITS} digits and "
            f"{TRUTH_BYTES} characters; correct or remove it"
        )
    values = {
        "negative": int(number.negative),
        "digits": [*(byte - ord("0") for byte in number.digits), *[-1] * (MAX_DIGITS - len(number.digits))],
        "exponent": number.exponent,
        "text": [*raw, *[-1] * (TRUTH_BYTES - len(raw))],
    }
    return {key: np.array(value, np.int32) for key, value in values.items()}


def examples(config: TaskConfig, split: str) -> list[Example]:
    """The examples of a split's file, as `question_files.split_items` divides them. Raises `UserError` as that does."""
    return _examples(*split_items(config, split, read_items, SOURCE), config)


def read(path: str, config: TaskConfig) -> list[Example]:
    """Read a file in one of the forms of `gsm8k_files.py`. Raises `UserError` with the line that is malformed."""
    return _examples(path, read_items(path), config)


def _examples(path: str, items: list[tuple[int, Item]], config: TaskConfig) -> list[Example]:
    demonstration = functools.partial(_demonstration, config=config)
    expected = f"a number of at most {MAX_DIGITS} digits after ####"
    return as_examples(path, items, _PROMPTS[config.prompt], demonstration, features, expected)


def _demonstration(item: Item, config: TaskConfig) -> str:
    if config.demonstration == "answer":
        return f"<answer>{item.truth}</answer>"
    solution = _CALCULATION.sub("", item.solution)
    if config.prompt.startswith("published"):
        return f"<reasoning>\n{solution}\n</reasoning>\n<answer>\n{item.truth}\n</answer>\n"
    return f"{solution}\n<answer>{item.truth}</answer>"


def grade_text(completion: str, features: Features, share: float = 0.0) -> dict[str, float]:
    """Grade one completion on the host; `share` is that of the format in the reward."""
    answer = number_text.final_answer(readable(completion))
    number = number_text.read(answer.span)
    correct, formed = number == _truth(features), answer.tagged and number is not None
    reward = (1.0 if formed else 1.0 - share) if correct else (share if formed else 0.0)
    return {"reward": float(np.float32(reward)), "correct": float(correct), "format": float(formed)}


def grade_bytes(
    stream: jax.Array, length: jax.Array, features: dict[str, jax.Array], share: float = 0.0
) -> dict[str, jax.Array]:
    """Grade uint8[B, W] texts of int32[B] bytes on the device: float32[B] per component; features as `features` has them."""
    span, size, tagged = number_device.final_answer(*number_device.readable(stream, length))
    number = number_device.read(span, size)
    correct, formed = number_device.equal(number, features), tagged & number.valid
    reward = jnp.where(correct, jnp.where(formed, 1.0, 1.0 - share), jnp.where(formed, share, 0.0))
    return {key: value.astype(jnp.float32) for key, value in zip(COMPONENTS, (reward, correct, formed), strict=True)}


def grade_text_published(completion: str, features: Features) -> dict[str, float]:
    """Grade one completion on the host by the published rules."""
    text = readable(completion)
    written = bytes(byte for byte in np.asarray(features["text"]).tolist() if byte >= 0)
    correct = float(gsm8k_published.parse(text) == _truth(features))
    return gsm8k_published.rewards(text, written) | {"correct": correct}


def grade_bytes_published(stream: jax.Array, length: jax.Array, features: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Grade texts on the device by the published rules; arrays as those of `grade_bytes`."""
    text, end = number_device.readable(stream, length)
    correct = number_device.equal(gsm8k_published.parse_device(text, end), features)
    return gsm8k_published.rewards_device(text, end, features["text"]) | {"correct": correct.astype(jnp.float32)}


def _truth(features: Features) -> number_text.Number:
    digits = bytes(digit + ord("0") for digit in np.asarray(features["digits"]).tolist() if digit >= 0)
    return number_text.Number(bool(features["negative"]), digits, int(features["exponent"]))


def summarize(rows: list[dict[str, Any]], examples: list[Example]) -> dict[str, Any]:
    """Figures of one graded answer to each example: `accuracy` and `exact` (the same), and the mean of every component.

    Raises `UserError` where the numbers of rows and examples differ or are zero.
    """
    check_graded(rows, examples)
    named = {*COMPONENTS, *gsm8k_published.COMPONENTS} - {"reward", "correct"}
    shares = {key: float(np.mean([row[key] for row in rows])) for key in rows[0] if key in named}
    exact = float(np.mean([row["correct"] for row in rows]))
    return {"accuracy": exact, "exact": exact} | shares


def configure(config: TaskConfig) -> Task:
    """The task with the reward that the settings name."""
    if config.reward == "published":
        return TASK._replace(
            components=gsm8k_published.COMPONENTS,
            grade_text=grade_text_published,
            grade_bytes=grade_bytes_published,
        )
    share = float(config.format_share)
    return TASK._replace(
        grade_text=functools.partial(grade_text, share=share), grade_bytes=functools.partial(grade_bytes, share=share)
    )


TASK = Task("gsm8k", COMPONENTS, features, examples, read, grade_text, grade_bytes, summarize, configure)
