"""What a task is: its settings, its examples and the functions that grade answers."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from dmpo_jax.errors import UserError

NAMES = ("sudoku", "countdown", "gsm8k", "math", "own")
QUESTIONS = ("gsm8k", "math")  # read from files of questions with worked answers
HOST_GRADED = ("math", "own")
PROMPTS = {
    "sudoku": ("compact", "rows", "instruct", "published"),
    "countdown": ("compact", "instruct", "published", "published_evaluation"),
    "gsm8k": ("compact", "instruct", "published", "published_evaluation"),
    "math": ("compact", "instruct", "published", "published_evaluation"),
    "own": ("compact",),
}
REWARDS = {
    "sudoku": ("exact", "published"),
    "countdown": ("exact",),
    "gsm8k": ("exact", "published"),
    "math": ("exact", "published"),
    "own": ("exact",),
}
DEMONSTRATIONS = dict.fromkeys(NAMES, ("answer",)) | dict.fromkeys(QUESTIONS, ("answer", "solution"))
SPLITS = ("train", "validation", "test")
# Larger sets would exhaust what the generators can draw without repeating themselves.
MAX_SIZE = {"train": 200_000, "validation": 20_000, "test": 20_000}

Features = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Settings of a task. The sizes are those of generated splits; a file is read whole."""

    name: str = "sudoku"
    prompt: str = "compact"
    reward: str = "exact"  # "published": that of the official code, faults included, for comparison
    format_share: float = 0.0  # of the reward "exact" of gsm8k and math: what an answer in the right form is worth
    demonstration: str = "answer"  # to imitate: the answer alone, or the worked "solution" of gsm8k and math before it
    file: str = ""  # of the task "own": the Python file with its examples and its reward
    grading_seconds: float = 5.0  # that a worker process may spend on one answer (math, own)
    grading_workers: int = 0  # worker processes; 0: one a core, at most 16 (math, own)
    train_file: str = ""
    validation_file: str = ""
    test_file: str = ""
    train_size: int = 4000
    validation_size: int = 256
    test_size: int = 256
    seed: int = 0
    careless: float = 0.0

    def validate(self) -> None:
        """Raise `UserError` naming the first setting that is out of its range."""
        if self.name == "countdown" and self.reward == "published":
            raise UserError(
                'task.reward = "published": countdown has it on the host only, since it is Python that computes there; set '
                'reward = "exact", and read `published` in the files of dmpo eval'
            )
        for key, choices in (
            ("name", dict.fromkeys(NAMES, NAMES)),
            ("prompt", PROMPTS),
            ("reward", REWARDS),
            ("demonstration", DEMONSTRATIONS),
        ):
            value, known = getattr(self, key), choices.get(self.name, NAMES)
            if value not in known:
                raise UserError(f"task.{key} = {value!r}: expected one of {', '.join(known)}; pick one of these")
        for split in SPLITS:
            file, size = getattr(self, f"{split}_file"), getattr(self, f"{split}_size")
            if not isinstance(file, str):
                raise UserError(f'task.{split}_file = {file!r}: expected a path as text; set "" to generate the data')
            if type(size) is not int or not 1 <= size <= MAX_SIZE[split]:
                raise UserError(
                    f"task.{split}_size = {size!r}: expected a whole number from 1 to {MAX_SIZE[split]}; "
                    f"set it in that range, or name a data file in task.{split}_file"
                )
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise UserError(f"task.seed = {self.seed!r}: expected a whole number from 0 to 2^63-1; use 0, 1, ...")
        for key in ("careless", "format_share"):
            share = getattr(self, key)
            if type(share) not in (int, float) or not math.isfinite(share) or not 0 <= share <= 1:
                raise UserError(f"task.{key} = {share!r}: expected a share from 0 to 1; use 0 for none")
        if self.format_share and (self.name not in QUESTIONS or self.reward != "exact"):
            raise UserError(
                f'task.format_share = {self.format_share}: only the reward "exact" of {" and ".join(QUESTIONS)} has one; '
                "leave it out"
            )
        if self.careless and self.name not in ("sudoku", "countdown"):
            raise UserError(f"task.careless = {self.careless}: {self.name} has no careless answers; leave it out")
        self._validate_grading()

    def _validate_grading(self) -> None:
        if (self.name == "own") != bool(self.file):
            remedy = (
                'name the Python file of the task "own"' if self.name == "own" else 'set task.name = "own" to use one'
            )
            raise UserError(f"task.file = {self.file!r} with task.name = {self.name!r}: {remedy}")
        for split in SPLITS:
            if self.name == "own" and getattr(self, f"{split}_file"):
                raise UserError(f"task.{split}_file: the task own has its examples from task.file; leave it out")
        if not 0 < self.grading_seconds <= 600:
            raise UserError(f"task.grading_seconds = {self.grading_seconds}: expected more than 0 and at most 600")
        if not 0 <= self.grading_workers <= 256:
            raise UserError(f"task.grading_workers = {self.grading_workers}: expected 0 (one a core) to 256")
        for field in dataclasses.fields(self):
            if field.name.startswith("grading_") and self.name not in HOST_GRADED:
                value = getattr(self, field.name)
                if value != field.default:
                    raise UserError(f"task.{field.name} = {value}: {self.name} is graded on the device; leave it out")


@dataclass(frozen=True)
class Example:
    """One question: prompt, a completion to imitate, the right answer, and int32 arrays for the graders."""

    prompt: str
    demonstration: str
    truth: str
    features: Features


class Task(NamedTuple):
    """The functions that make up a task; `components` names what the graders return, `reward` first.

    `features(truth)` makes the graders' int32 arrays from a plain dictionary such as `{"numbers": [3, 4],
    "target": 7}`. `examples(config, split)` and `read(path, config)` give a list of `Example`.
    `grade_text(completion, features)` grades one text on the host; `grade_bytes(stream, length, features)`
    grades `uint8[B, W]` texts of `int32[B]` bytes on the device, with features `int32[B, ...]`, and returns
    `float32[B]` for each component; both agree on every string. `summarize(rows, examples)` gives figures of
    a graded set. `configure(config)`, where there is one, is the task with the reward that the settings name.

    A task that no device can grade has no `grade_bytes`: worker processes grade it, started with the arguments `worker` and
    asked with `request(completion, features)` (`grading/pool.py`).
    """

    name: str
    components: tuple[str, ...]
    features: Callable[[dict[str, Any]], Features]
    examples: Callable[[TaskConfig, str], list[Example]]
    read: Callable[[str, TaskConfig], list[Example]]
    grade_text: Callable[[str, Features], dict[str, float]]
    grade_bytes: Callable[[jax.Array, jax.Array, dict[str, jax.Array]], dict[str, jax.Array]] | None
    summarize: Callable[[list[dict[str, Any]], list[Example]], dict[str, Any]]
    configure: Callable[[TaskConfig], "Task"] | None = None
    worker: tuple[str, ...] = ()
    request: Callable[[str, Features], dict[str, Any]] | None = None


def check_graded(rows: list[dict[str, Any]], examples: list[Example]) -> None:
    """Raise `UserError` unless there is one graded row for each example, and one at least."""
    if not rows or len(rows) != len(examples):
        raise UserError(f"{len(rows)} graded rows for {len(examples)} examples: expected one for each; grade all")


def check_split(split: str) -> None:
    """Raise `UserError` unless the split is train, validation or test."""
    if split not in SPLITS:
        raise UserError(f"data split {split!r}: expected one of {', '.join(SPLITS)}; pick one of these")
