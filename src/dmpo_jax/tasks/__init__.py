"""What is asked and how answers are graded: prompts, data, host and device graders of each task."""

import importlib
from typing import Any

# Not imported here: the grading processes, which use some of these rooms, should not load JAX.
_ROOMS = {"TASKS": "registry", "get_task": "registry", "Example": "task", "Task": "task", "TaskConfig": "task"}

__all__ = list(_ROOMS)


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
