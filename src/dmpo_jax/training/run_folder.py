"""The folder of a run: which configuration it belongs to, and whether this one may go on in it."""

import dataclasses
import tomllib
from pathlib import Path

from dmpo_jax.config import Config, resolve, vars_of
from dmpo_jax.errors import UserError
from dmpo_jax.training.metrics import write_text

CONFIG = "config.toml"
# What may change between the start of a run and its continuation without changing its numbers.
FREE = ("mesh", "checkpoint", "run.compilation_cache")


def read_config(run_dir: Path) -> Config:
    """The resolved configuration of a run folder. Raises UserError when it holds none."""
    path = run_dir / CONFIG
    try:
        return resolve(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError:
        raise UserError(f"{run_dir}: no {CONFIG}; give the folder of a run (dmpo train CONFIG --run-dir DIR)") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def differences(old: Config, new: Config) -> list[str]:
    """`section.key: old -> new` of every setting whose change would change the run."""
    found = []
    for name, section in vars_of(new).items():
        before = getattr(old, name)
        if type(before) is not type(section):
            found.append(f"{name}.name: {before.name} -> {section.name}")
            continue
        for key, value in vars_of(section).items():
            longer = f"{name}.{key}" == "run.cycles" and new.optimizer.schedule == "constant"
            if getattr(before, key) != value and not longer and name not in FREE and f"{name}.{key}" not in FREE:
                found.append(f"{name}.{key}: {getattr(before, key)!r} -> {value!r}")
    return found


def claim(run_dir: Path, config: Config) -> None:
    """Makes the folder this configuration's, or raises UserError when it is another's."""
    if (run_dir / CONFIG).exists():
        changed = differences(read_config(run_dir), config)
        if changed:
            raise UserError(
                f"{run_dir}: holds a run of another configuration ({'; '.join(changed)}); "
                "use another --run-dir, or the configuration it began with"
            )
    elif run_dir.is_dir() and any(run_dir.iterdir()):
        raise UserError(f"{run_dir}: is not empty and holds no {CONFIG}; use a new or empty --run-dir")
    write_text(run_dir / CONFIG, config.to_toml())


def model_differences(run_dir: Path, config: Config) -> list[str]:
    """Settings of the model and tokenizer in which a run folder's policy differs from `config`'s."""
    other = read_config(run_dir)
    mine = config.model
    if other.model.vocab_size == 0 or mine.vocab_size == 0:  # the tokenizer's, which is compared
        other = dataclasses.replace(other, model=dataclasses.replace(other.model, vocab_size=mine.vocab_size))
    # Where the weights came from and how they are stored is not a matter of what they are.
    kept = dataclasses.replace(other.model, pretrained=mine.pretrained, base=mine.base)
    other = dataclasses.replace(other, model=kept)
    return differences(dataclasses.replace(config, model=other.model, tokenizer=other.tokenizer), config)
