r"""MATH: competition problems whose answer is a mathematical expression. Graded on the host, in worker processes.

Grading (`dmpo_jax.grading.math_grader`). The answer is the last complete box in the last complete answer tag, else that tag's
text, else the last complete box. `correct` is 1 where it equals the true one, however both are written; `format` is 1 where
there is an answer at all. `reward` is (1 - s) correct + s format with the share s = `task.format_share`, 0 if not set. With
`task.reward = "published"` rewards and `correct` are those of `dmpo_jax.grading.math_published`.
"""

import functools
from typing import Any

import numpy as np

from dmpo_jax.errors import UserError
from dmpo_jax.grading import math_grader, math_library, math_published
from dmpo_jax.tasks.math_files import SOURCE, read_items
from dmpo_jax.tasks.question_files import Item, as_examples, split_items
from dmpo_jax.tasks.task import Example, Features, Task, TaskConfig, check_graded

COMPONENTS = math_grader.COMPONENTS
TRUTH_BYTES = 256

_INSTRUCTIONS = """{question}
Reason first, step by step, in words. Then give the answer alone, in a box, like this:
<answer>\\boxed{{\\frac{{3}}{{4}}}}</answer>"""

# Interfaces of published models: what the d1 family sends in training and in evaluation, to the letter.
_PUBLISHED = (
    "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n\n\n"
    "You are a math expert. You will be given a question to solve. Solve it step by step. "
    "Wrap the final answer in a \\boxed{{}}. \n\n{question}"
)
_PUBLISHED_EVALUATION = (
    "You are a math expert. You will be given a question to solve. Solve it step by step. "
    "Wrap the final answer in a \\boxed{{}}.\n"
    "Respond in the following format:\n<reasoning>\nYour reasoning here\n</reasoning>\n"
    '<answer>\n\\boxed{{...}}\n</answer>" \n\n\n{question}'
)
_PROMPTS = {
    "compact": "{question}\n",
    "instruct": _INSTRUCTIONS,
    "published": _PUBLISHED,
    "published_evaluation": _PUBLISHED_EVALUATION,
}


def features(truth: str | dict[str, Any]) -> Features:
    """What graders need of the true answer, or of `{"answer": "..."}`: `text` int32[TRUTH_BYTES], its UTF-8 filled up with -1.

    Raises `UserError` where it is empty or too long.
    """
    text = str(truth["answer"] if isinstance(truth, dict) else truth).strip()
    raw = text.encode("utf-8", "replace")
    if not 0 < len(raw) <= TRUTH_BYTES:
        raise UserError(
            f"true answer {text[:80]!r}: expected an expression of 1 to {TRUTH_BYTES} bytes; correct or remove it"
        )
    return {"text": np.array([*raw, *[-1] * (TRUTH_BYTES - len(raw))], np.int32)}


def truth_of(features: Features) -> str:
    """The true answer that `features` hold."""
    return bytes(byte for byte in np.asarray(features["text"]).tolist() if byte >= 0).decode()


def examples(config: TaskConfig, split: str) -> list[Example]:
    """The examples of a split's file, as `question_files.split_items` divides them. Raises `UserError` as that does."""
    return _examples(*split_items(config, split, read_items, SOURCE), config)


def read(path: str, config: TaskConfig) -> list[Example]:
    """Read a file in one of the forms of `math_files.py`. Raises `UserError` with the line that is malformed."""
    return _examples(path, read_items(path), config)


def _examples(path: str, items: list[tuple[int, Item]], config: TaskConfig) -> list[Example]:
    demonstration = functools.partial(_demonstration, config=config)
    expected = f"an answer of at most {TRUTH_BYTES} bytes"
    return as_examples(path, items, _PROMPTS[config.prompt], demonstration, features, expected)


def _demonstration(item: Item, config: TaskConfig) -> str:
    answer = rf"\boxed{{{item.truth}}}"
    if config.demonstration == "answer" or not item.solution:
        return f"<answer>{answer}</answer>"
    if config.prompt.startswith("published"):
        return f"<reasoning>\n{item.solution}\n</reasoning>\n<answer>\n{answer}\n</answer>\n"
    return f"{item.solution}\n<answer>{answer}</answer>"


def grade_text(completion: str, features: Features, reward: str = "exact", share: float = 0.0) -> dict[str, float]:
    """Grade one completion in this process, without limits on time. Raises `UserError` where math-verify is not installed."""
    return math_grader.grade(completion, truth_of(features), reward, share)


def request(completion: str, features: Features) -> dict[str, Any]:
    """What a worker process is asked."""
    return {"completion": completion, "truth": truth_of(features)}


def summarize(rows: list[dict[str, Any]], examples: list[Example]) -> dict[str, Any]:
    """Figures of one graded answer to each example: `accuracy` and `exact` (the same), and the mean of every component.

    An answer without a verdict counts as wrong. Raises `UserError` where the numbers of rows and examples differ or are zero.
    """
    check_graded(rows, examples)
    named = {*COMPONENTS, *math_published.COMPONENTS} - {"reward", "correct"}
    mean = lambda name: float(np.mean(np.nan_to_num([float(row[name]) for row in rows])))  # noqa: E731
    exact = mean("correct")
    shares = {name: mean(name) for name in rows[0] if name in named}
    return {"accuracy": exact, "exact": exact} | shares


def configure(config: TaskConfig) -> Task:
    """The task with the reward that the settings name. Raises `UserError` where math-verify is not installed."""
    math_library.require()  # for the strict verdict, whatever the reward
    share = float(config.format_share)
    return TASK._replace(
        components=math_published.COMPONENTS if config.reward == "published" else COMPONENTS,
        grade_text=functools.partial(grade_text, reward=config.reward, share=share),
        worker=("math", config.reward, repr(share)),
    )


TASK = Task(
    *("math", COMPONENTS, features, examples, read, grade_text, None, summarize, configure),
    worker=("math", "exact", "0.0"),
    request=request,
)
