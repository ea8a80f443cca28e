"""The folder of a run: which configuration it belongs to, and whether this one may go on in it."""

import dataclasses
import importlib.metadata
import time
from pathlib import Path
from typing import Any

from dmpo_jax.config import Config, resolve, vars_of
from dmpo_jax.errors import UserError
from dmpo_jax.parallel import distributed
from dmpo_jax.toml_files import read_tables
from dmpo_jax.training.metrics import write_text
from dmpo_jax.training.setup import make_setup

CONFIG = "config.toml"
# Settings of a machine, which even the processes of one run need not have in common.
LOCAL = ("run.compilation_cache", "run.start_timeout", "run.heartbeat", "run.watchdog")
# What may change between the start of a run and its continuation without changing its numbers.
FREE = ("mesh", "checkpoint", "logging", *LOCAL)
VISIBLE_S = 30  # a file of another host may take some seconds to appear


def read_config(run_dir: Path) -> Config:
    """The resolved configuration of a run folder. Raises UserError when it holds none."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise UserError(f"{run_dir}: no {CONFIG}; give the folder of a run (dmpo train CONFIG --run-dir DIR)")
    return resolve(read_tables(path))


def differences(old: Config, new: Config) -> list[str]:
    """`section.key: old -> new` of every setting whose change would change the run."""
    found = []
    for name, section in vars_of(new).items():
        before = getattr(old, name)
        if type(before) is not type(section):
            found.append(f"{name}.name: {before.name} -> {section.name}")
            continue
        for key, value in vars_of(section).items():
            was = getattr(before, key)
            longer = f"{name}.{key}" == "run.cycles" and value > was and new.optimizer.schedule == "constant"
            if was != value and not longer and name not in FREE and f"{name}.{key}" not in FREE:
                found.append(f"{name}.{key}: {was!r} -> {value!r}")
    return found


def claim(run_dir: Path, config: Config) -> None:
    """Makes the folder this configuration's, or raises UserError when it is another's.

    A folder that a start left behind before it had anything to keep may be claimed anew; one whose results have lost
    their checkpoints is refused, as starting over would overwrite them.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"--run-dir {run_dir}: is a file; give a folder, new or of a run")
    saved = has_checkpoint(run_dir)
    results = [n for n in ("metrics.jsonl", "summary.json") if (run_dir / n).exists() and (run_dir / n).stat().st_size]
    if results and not saved:
        raise UserError(
            f"{run_dir}: holds {results[0]} but no checkpoint to go on from; put checkpoints back, or use another --run-dir"
        )
    if (run_dir / CONFIG).exists() and saved:
        changed = differences(read_config(run_dir), config)
        if changed:
            raise UserError(
                f"{run_dir}: holds a run of another configuration ({'; '.join(changed)}); "
                "use another --run-dir, or the configuration it began with"
            )
    elif not (run_dir / CONFIG).exists() and run_dir.is_dir() and any(run_dir.iterdir()):
        raise UserError(f"{run_dir}: is not empty and holds no {CONFIG}; use a new or empty --run-dir")
    write_text(run_dir / CONFIG, config.to_toml())


def claim_together(run_dir: Path, config: Config) -> None:
    """`claim` by process 0 for all. Raises UserError on a process that does not see the same folder."""
    if distributed.is_main():
        claim(run_dir, config)
    path = run_dir / CONFIG
    written = distributed.decide("claim", path.read_text(encoding="utf-8") if distributed.is_main() else "")
    until = time.monotonic() + VISIBLE_S
    while not (path.is_file() and path.read_text(encoding="utf-8") == written):
        if time.monotonic() > until:
            raise UserError(
                f"process {distributed.index()}: does not see the {path} that process 0 wrote; give a --run-dir on a file "
                "system that all hosts share"
            )
        time.sleep(0.5)


def settings(run_dir: Path, config: Config) -> dict[str, Any]:
    """What the processes of a run must have in common before they begin, by name."""
    sections = vars_of(config).items()
    found = {f"{name}.{key}": value for name, section in sections for key, value in vars_of(section).items()}
    found = {key: value for key, value in found.items() if key not in LOCAL}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "dmpo_jax")}
    return {**versions, "--run-dir": str(run_dir), **found}


def has_checkpoint(run_dir: Path) -> bool:
    """Whether a finished checkpoint lies in the folder."""
    folder = run_dir / "checkpoints"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; expected the folder of checkpoints")
    return folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())


def model_differences(run_dir: Path, config: Config) -> list[str]:
    """Settings of the model and tokenizer in which a run folder's policy differs from `config`'s."""
    other = read_config(run_dir)
    mine = config.model
    sizes = [make_setup(c).model.vocab_size for c in (other, config)] if other.tokenizer == config.tokenizer else [0, 0]
    if sizes[0] == sizes[1]:  # 0 stands for the tokenizer's
        other = dataclasses.replace(other, model=dataclasses.replace(other.model, vocab_size=mine.vocab_size))
    # Where the weights came from and how they are stored is not a matter of what they are.
    kept = dataclasses.replace(other.model, pretrained=mine.pretrained, base=mine.base, attention=mine.attention)
    other = dataclasses.replace(other, model=kept)
    return differences(dataclasses.replace(config, model=other.model, tokenizer=other.tokenizer), config)
