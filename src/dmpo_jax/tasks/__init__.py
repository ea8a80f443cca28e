"""What is asked and how answers are graded: prompts, data, host and device graders of each task."""

import difflib

from dmpo_jax.errors import UserError
from dmpo_jax.tasks import countdown, sudoku
from dmpo_jax.tasks.task import Example, Task, TaskConfig

__all__ = ["TASKS", "Example", "Task", "TaskConfig", "get_task"]

TASKS = {task.name: task for task in (sudoku.TASK, countdown.TASK)}


def get_task(name: str) -> Task:
    """The task of that name. Raises `UserError` with the nearest name where there is none."""
    if name not in TASKS:
        near = difflib.get_close_matches(str(name), TASKS, n=1, cutoff=0.0)[0]
        raise UserError(f"task.name = {name!r}: expected one of {', '.join(TASKS)}; did you mean {near!r}?")
    return TASKS[name]
