"""The tasks by name."""

import difflib

from dmpo_jax.errors import UserError
from dmpo_jax.tasks import countdown, gsm8k, math, own, sudoku
from dmpo_jax.tasks.task import Task, TaskConfig

TASKS = {task.name: task for task in (sudoku.TASK, countdown.TASK, gsm8k.TASK, math.TASK, own.TASK)}


def get_task(name: str, config: TaskConfig | None = None) -> Task:
    """The task of that name, with the reward of the settings if given. Raises `UserError` with the nearest name."""
    if name not in TASKS:
        near = difflib.get_close_matches(str(name), TASKS, n=1, cutoff=0.0)[0]
        raise UserError(f"task.name = {name!r}: expected one of {', '.join(TASKS)}; did you mean {near!r}?")
    task = TASKS[name]
    return task.configure(config) if config and task.configure else task
