"""What is finished already: told from files, without starting the program that made them."""

from pathlib import Path
from typing import Any

from dmpo_jax.errors import UserError, shown
from dmpo_jax.inputs import json_or_none
from dmpo_jax.reproduction.steps import Step
from dmpo_jax.toml_files import read_extended, read_tables

# What a finished run may have otherwise: where it lies and came from, and how it was spread over a machine.
PATHS = ("run.start_from", "objective.teacher", "model.pretrained", "task.train_file")
SECTIONS = ("mesh", "checkpoint", "logging")


def is_finished(step: Step) -> bool:
    """Whether the step's last file is there and whole. Raises UserError where it is of other settings than the list's."""
    if step.marked:
        return step.done.is_file()
    value = json_or_none(step.done)
    if value is None or (step.kind == "train" and value.get("status") != "done"):
        return False
    if step.kind == "train":
        _check_settings(step)
    return True


def is_started(step: Step) -> bool:
    """Whether a training left something to go on from."""
    return step.kind == "train" and (step.done.parent / "checkpoints").is_dir()


def _check_settings(step: Step) -> None:
    """A run of a list that was changed since must not stand in a table as one of the new list."""
    path = step.done.parent / "config.toml"
    if not path.is_file():
        raise UserError(
            f"{step.done.parent}: finished, but its config.toml is gone; remove the folder, or give another --out"
        )
    found, changed = read_tables(path), []
    for key, value in wanted_settings(step).items():
        section, _, name = key.partition(".")
        if section in SECTIONS or key in PATHS:
            continue
        was = found.get(section, {}).get(name)
        if was != value:
            changed.append(f"{key}: {shown(was)} -> {shown(value)}")
    if changed:
        raise UserError(
            f"{step.done.parent}: finished with other settings ({'; '.join(changed[:3])}); remove it, or give another --out"
        )


def wanted_settings(step: Step) -> dict[str, Any]:
    """`section.key` and value of all that a training's recipe and the list say; what they leave out is a default's."""
    tables = read_extended(Path(step.run.config))
    found = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
    return found | dict(step.settings)
