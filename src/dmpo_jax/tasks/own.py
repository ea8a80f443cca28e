"""A user's own task: a Python file with examples and a reward. The file runs in worker processes only.

The file defines two functions:

    examples(split)              dictionaries, each with a "prompt", and whatever the reward needs; JSON values alone.
                                 `split` is train, validation or test. None for validation: some are held out of training.
    reward(completion, example)  a number, or named numbers of which one is "reward". The names are those that it gives for
                                 the demonstration of the first example of train.

A "demonstration" in an example is what `denoise` imitates, and an "answer" is what results show as the truth; both are
optional. In results `accuracy` is the mean of the component "correct" if the reward has one, else of the reward, cut to
[0, 1]; `exact` is the share of items whose value is 1 or more. An answer whose grading raises or takes longer than
`task.grading_seconds` has no reward: it counts as wrong in an evaluation, teaches nothing in training, and is counted.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dmpo_jax.errors import UserError
from dmpo_jax.grading.pool import ask_once
from dmpo_jax.tasks.files import read_lines, wrong
from dmpo_jax.tasks.question_files import held_out
from dmpo_jax.tasks.task import Example, Features, Task, TaskConfig, check_graded, check_split

READING_SECONDS = 1800.0  # for examples(split): it may read or build a data set
READING_BYTES = 1 << 30


def configure(config: TaskConfig) -> Task:
    """The task of the file that the settings name. Raises `UserError` where it is no task or has nothing to train on."""
    rows: list[dict[str, Any]] = []  # of all splits that were read; an example's feature is its place here
    worker = ("own", str(Path(config.file).resolve()))
    if not Path(config.file).is_file():
        raise UserError(f"task.file = {config.file!r}: No such file; name a Python file, as in the README's example")

    def request(completion: str, features: Features) -> dict[str, Any]:
        return {"completion": completion, "example": rows[int(features["number"])]}

    def as_examples(found: list[dict[str, Any]]) -> list[Example]:
        first = len(rows)
        rows.extend(found)
        return [_example(row, first + i) for i, row in enumerate(found)]

    @functools.cache
    def split_rows(split: str) -> list[dict[str, Any]]:
        reply = ask_once(worker, {"split": split}, READING_SECONDS, READING_BYTES)
        if "failure" in reply:
            raise UserError(f"{config.file}: examples({split!r}): {reply['failure']}")
        if reply["rows"] is not None:
            return reply["rows"]
        if split != "validation":
            remedy = "return some" if split == "train" else "return some, or set evaluation.test = false"
            raise UserError(f"{config.file}: examples({split!r}) returned None, expected examples; {remedy}")
        held = held_out([row["prompt"] for row in split_rows("train")], config.validation_size)
        return [row for row, is_held in zip(split_rows("train"), held, strict=True) if is_held]

    def examples(settings: TaskConfig, split: str) -> list[Example]:
        check_split(split)
        found = split_rows(split)
        if split == "train":
            kept = {row["prompt"] for row in split_rows("validation")}
            left = [row for row in found if row["prompt"] not in kept]
            if not left:
                raise UserError(
                    f"{config.file}: every prompt of examples('train') is held out or in examples('validation')"
                )
            found = left
        return as_examples(found)

    def read(path: str, settings: TaskConfig) -> list[Example]:
        return as_examples(_read_rows(path))

    def components() -> tuple[str, ...]:
        example = split_rows("train")[0]
        probe = {"completion": _demonstration(example), "example": example}
        reply = ask_once(worker, probe, config.grading_seconds)
        if "failure" in reply:  # as it may be with answers of a model too: no reason to stop
            print(
                f"warning: {config.file}: reward of the first example: {reply['failure']}", file=sys.stderr, flush=True
            )
        return ("reward", *(name for name in reply.get("values", {}) if name != "reward"))

    return Task("own", components(), _features, examples, read, _no_text, None, summarize, None, worker, request)


def _example(row: dict[str, Any], number: int) -> Example:
    return Example(row["prompt"], _demonstration(row), str(row.get("answer", "")), {"number": np.int32(number)})


def _demonstration(row: dict[str, Any]) -> str:
    return str(row.get("demonstration", row.get("answer", "")))


def _read_rows(path: str) -> list[dict[str, Any]]:
    form = 'a JSON object with a text under "prompt"'
    rows = []
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise wrong(path, number, line, form, "correct or remove the line")
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: holds no examples, expected lines each with {form}; add some")
    return rows


def _features(truth: Any) -> Features:
    raise UserError("the task own takes its examples from task.file; call its `examples`")


def _no_text(completion: str, features: Features) -> dict[str, float]:
    raise UserError("the task own is graded in worker processes; ask a GraderPool with `request`")


def summarize(rows: list[dict[str, Any]], examples: list[Example]) -> dict[str, Any]:
    """`accuracy` and `exact` of one graded answer to each example; an answer without a verdict counts as wrong.

    Raises `UserError` where the numbers of rows and examples differ or are zero.
    """
    check_graded(rows, examples)
    key = "correct" if "correct" in rows[0] else "score"  # which is the reward
    value = np.nan_to_num(np.clip([float(row[key]) for row in rows], 0.0, 1.0))
    return {"accuracy": float(np.mean(value)), "exact": float(np.mean(value >= 1.0))}


# Without a file it is a name among the tasks; `configure` makes it one.
TASK = Task("own", ("reward",), _features, lambda *_: [], lambda *_: [], _no_text, None, summarize, configure)
