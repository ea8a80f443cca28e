"""`--refresh-plan`: `dmpo plan` for the shapes that are missing in plan.json, and the hours in the recipes' heads."""

import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dmpo_jax.config import Config, TokenizerConfig, load_config
from dmpo_jax.errors import UserError
from dmpo_jax.inputs import read_json
from dmpo_jax.reproduction.estimate import (
    Plan,
    as_text,
    digest_of,
    estimate,
    mesh_of,
    plan_of,
    read_plans,
    shape_of,
    shown,
)
from dmpo_jax.reproduction.manifest import Hardware, Manifest, Run
from dmpo_jax.reproduction.reading import as_options
from dmpo_jax.tasks.task import TaskConfig
from dmpo_jax.training.metrics import write_text

HOURS = re.compile(r"^# Hours: .*$", re.MULTILINE)


def planned_as(config: Config) -> Config:
    """The same programs with data that are made up, so that no file is needed; grading, which weighs nothing, is sudoku's."""
    return dataclasses.replace(config, task=TaskConfig(train_size=64), tokenizer=TokenizerConfig())


def refresh(
    manifest: Manifest,
    runs: Sequence[Run],
    hardware: Sequence[str],
    path: Path,
    dmpo: Sequence[str],
    say: Callable[[str], Any],
) -> dict[str, str]:
    """Plans every shape of the runs on every hardware that `path` does not hold yet, and keeps each at once.

    The file is read anew each time, so that several starts with other runs or hardware can share it. Returns what could not be
    planned, by name, with the reason.
    """
    failed = {}
    for run in (run for run in runs if run.kind == "train"):
        config = load_config(run.config)
        shape = shape_of(config)
        for name in hardware:
            key = (digest_of(shape), manifest.hardware[name].topology, mesh_of(manifest.hardware[name]))
            if any(key == (plan.shape, plan.topology, plan.mesh) for plan in read_plans(path)):
                continue
            say(f"{run.name} on {name} ...")
            try:
                new = _planned(config, manifest.hardware[name], dmpo)
            except UserError as error:
                failed[f"{run.name} on {name}"] = str(error)
                say(f"{run.name} on {name}: {error}")
                continue
            plans, shapes = read_plans(path), read_json(path)["shapes"]
            write_text(path, as_text([*plans, new], shapes | {new.shape: shape}))
    plans = read_plans(path)
    for run in (run for run in runs if run.kind == "train"):
        write_hours(Path(run.config), hours_line(manifest, load_config(run.config), plans))
    return failed


def _planned(config: Config, hardware: Hardware, dmpo: Sequence[str]) -> Plan:
    with tempfile.TemporaryDirectory() as folder:
        recipe, out = Path(folder) / "planned.toml", Path(folder) / "plan.json"
        recipe.write_text(planned_as(config).to_toml(), encoding="utf-8")
        how = ["--quick", "--cycle-only", "--topology", hardware.topology, "--out", str(out)]
        command = [*dmpo, "plan", str(recipe), *how, *as_options(hardware.mesh)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            lines = ran.stderr.strip().splitlines() or ["it said nothing"]
            raise UserError(f"dmpo plan ended with code {ran.returncode}: {lines[-1][:300]}")
        (found,) = json.loads(out.read_text(encoding="utf-8"))
        return plan_of(config, found)


def hours_line(manifest: Manifest, config: Config, plans: list[Plan]) -> str:
    """The line of a recipe's head on how long it takes."""
    found = {name: estimate(plans, config, kind, manifest.share_of_peak) for name, kind in manifest.hardware.items()}
    planned = [f"{name} {shown(one)}" for name, one in found.items() if one.planned]
    if not planned:
        return "# Hours: not planned yet"
    return f"# Hours: estimated from the plan at {manifest.share_of_peak:.0%} of peak: {'; '.join(planned)}"


def write_hours(recipe: Path, line: str) -> None:
    """Puts the line into a recipe's head. Raises UserError where the head has none to replace."""
    text = recipe.read_text(encoding="utf-8")
    new, count = HOURS.subn(lambda _: line, text, count=1)
    if not count:
        raise UserError(f"{recipe}: its head has no line that begins with '# Hours: '; add one")
    if new != text:
        write_text(recipe, new)
