"""`--dry-run`: every run with its state, configuration, hardware, hours, memory and commands; nothing is started."""

import shlex
from collections.abc import Iterator, Sequence

from dmpo_jax.errors import UserError
from dmpo_jax.reproduction.manifest import Manifest
from dmpo_jax.reproduction.progress import is_finished, is_started
from dmpo_jax.reproduction.steps import Step


def state_of(step: Step) -> str:
    """finished, to go on, to do, or what is wrong with what is there."""
    try:
        if is_finished(step):
            return "finished"
    except UserError as error:
        return f"refused: {error}"
    return "to go on" if is_started(step) else "to do"


def listing(steps: Sequence[Step], estimates: dict[str, dict[str, str]], variables: dict[str, str]) -> Iterator[str]:
    """Lines of the listing. `estimates`: by configuration, what is known on each hardware; empty for the small scale."""
    prefix = "".join(f"{key}={value} " for key, value in variables.items())
    for step in steps:
        minutes = f"about {step.run.minutes:g} min" if step.run.minutes else "not measured"
        how = [state_of(step), step.run.config]
        if step.kind == "train" and not estimates:
            how.append(minutes)
        yield f"{step.name}: {', '.join(how)}"
        if step.kind == "train":
            for name, text in estimates.get(step.run.config, {}).items():
                yield f"  {name:<8} {text}"
        for file in step.files:
            yield f"  reads {file}"
        yield f"  $ {prefix}{shlex.join(step.command)}"


def totals(manifest: Manifest, steps: Sequence[Step], hours: dict[str, dict[str, float | None]]) -> Iterator[str]:
    """Lines with the sum of hours on each hardware over the trainings that are planned on it."""
    trained = [step for step in steps if step.kind == "train"]
    for name, kind in manifest.hardware.items():
        known = [found for step in trained if (found := hours.get(step.run.config, {}).get(name)) is not None]
        total = f", {sum(known):,.0f} h for these" if known else ""
        yield f"{kind.title}: {len(known)} of {len(trained)} trainings planned{total}"
    if manifest.hardware:
        yield (
            f"hours are of training alone, cycles x roofline seconds / {manifest.share_of_peak:g}: an assumed share of the "
            "peak; nothing of it was measured"
        )
