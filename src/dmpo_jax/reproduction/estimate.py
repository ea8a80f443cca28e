"""Hours and memory of a run on hardware that is not here, from `configs/reproduce/plan.json`.

The file keeps what `dmpo plan` said, by the settings that shape a run's programs, the topology and the mesh. Hours are those
of training alone: cycles x the roofline seconds of a cycle / an assumed share of the peak. Nothing of it is a measurement.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from dmpo_jax.config import Config, vars_of
from dmpo_jax.errors import UserError
from dmpo_jax.inputs import read_json
from dmpo_jax.reproduction.manifest import Hardware
from dmpo_jax.reproduction.reading import Fields

SECTIONS = ("model", "lora", "rollout", "sampler", "objective")
# Where weights lie; and the number of updates, by which a plan's seconds are scaled.
APART = ("model.pretrained", "lora.adapter", "objective.teacher", "objective.updates")
PHASES = ("sample", "grade", "prepare", "update", "other")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Of one shape on one topology and mesh: bytes and seconds of one device; `seconds` is None where it does not fit."""

    shape: str
    topology: str
    mesh: tuple[int, int, int]
    effort: str
    jax: str
    updates: int
    fits: bool
    peak: float | None
    limit: float
    seconds: dict[str, float] | None

    def cycle_seconds(self, updates: int) -> float | None:
        """Roofline seconds of a cycle with so many updates; those of the plan's are taken to last equally long."""
        if self.seconds is None:
            return None
        scale = updates / self.updates
        return sum(value * (scale if phase == "update" else 1.0) for phase, value in self.seconds.items())


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Hours on the devices together and GB of one device; None where that is not known."""

    planned: bool
    fits: bool = False
    hours: float | None = None
    peak_gb: float | None = None
    limit_gb: float | None = None


def shape_of(config: Config) -> dict[str, Any]:
    """Settings that shape the programs. A fraction counts only by whether it is 0: its value changes no shape."""
    found = {}
    for section in SECTIONS:
        for key, value in vars_of(getattr(config, section)).items():
            if f"{section}.{key}" not in APART:
                found[f"{section}.{key}"] = bool(value) if isinstance(value, float) else value
    return json.loads(json.dumps(found))


def digest_of(shape: dict[str, Any]) -> str:
    """A short name of a shape."""
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:12]


def mesh_of(hardware: Hardware) -> tuple[int, int, int]:
    """(data, fsdp, model) of a piece of hardware, axes that are not named being 1."""
    named = {key.removeprefix("mesh."): value for key, value in hardware.mesh}
    return (named.get("data", 1), named.get("fsdp", 1), named.get("model", 1))


def read_plans(path: Path) -> list[Plan]:
    """Raises UserError where the file is not as `write_plans` writes it."""
    remedy = "launch/reproduce --scale 8b --refresh-plan writes it"
    fields = Fields(read_json(path, remedy), str(path))
    shapes = fields.take("shapes", dict)
    plans = [_plan(entry, f"{path}: plan {i}", shapes) for i, entry in enumerate(fields.take("plans", list), 1)]
    fields.end()
    for name, shape in shapes.items():
        if digest_of(shape) != name:
            raise UserError(f"{path}: shape {name[:40]}: is not the digest of its settings; {remedy}")
    return plans


def _plan(entry: Any, where: str, shapes: dict[str, Any]) -> Plan:
    fields = Fields(entry, where)
    shape = fields.take("shape", str)
    if shape not in shapes:
        raise UserError(f"{where}: shape = {shape[:40]}: there is no such shape in the file")
    seconds, mesh = fields.take("seconds", dict, None), fields.take("mesh", list)
    if len(mesh) != 3 or any(type(size) is not int or size < 1 for size in mesh):
        raise UserError(f"{where}: mesh = {mesh}: expected the sizes of data, fsdp and model")
    if seconds is not None:
        phases = Fields(seconds, f"{where}: seconds")
        seconds = {phase: value for phase in PHASES if (value := phases.take(phase, float, None)) is not None}
        phases.end()
    plan = Plan(
        shape,
        fields.take("topology", str),
        tuple(mesh),
        fields.take("effort", str),
        fields.take("jax", str),
        fields.take("updates", int),
        fields.take("fits", bool),
        fields.take("peak", (int, float), None),
        fields.take("limit", (int, float)),
        seconds,
    )
    fields.end()
    if plan.updates < 1:
        raise UserError(f"{where}: updates = {plan.updates}: expected 1 or more")
    return plan


def plan_of(config: Config, found: dict[str, Any]) -> Plan:
    """What `dmpo plan --out` says of one topology, as kept here: the largest program's peak and the cycle's seconds."""
    programs = found["programs"]
    peaks = [program["peak"] for program in programs.values()]
    mesh = found["mesh"]
    return Plan(
        shape=digest_of(shape_of(config)),
        topology=found["topology"],
        mesh=(mesh["data"], mesh["fsdp"], mesh["model"]),
        effort=found["effort"],
        jax=found["jax"],
        updates=config.objective.updates,
        fits=all(program["fits"] for program in programs.values()),
        peak=None if None in peaks else max(peaks),
        limit=found["memory_limit"],
        seconds=programs["cycle"].get("roofline"),
    )


def as_text(plans: list[Plan], shapes: dict[str, dict[str, Any]]) -> str:
    """The file's text: a line for each shape and each plan."""
    lines = [f"  {json.dumps(name)}: {json.dumps(shape)}" for name, shape in sorted(shapes.items())]
    entries = [{k: v for k, v in dataclasses.asdict(plan).items() if v is not None} for plan in plans]
    return (
        '{\n "shapes": {\n' + ",\n".join(lines) + '\n },\n "plans": [\n'
        + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n ]\n}\n"
    )  # fmt: skip


def estimate(plans: list[Plan], config: Config, hardware: Hardware, share_of_peak: float) -> Estimate:
    """Of a whole training on that hardware."""
    shape, mesh = digest_of(shape_of(config)), mesh_of(hardware)
    for plan in plans:
        if (plan.shape, plan.topology, plan.mesh) == (shape, hardware.topology, mesh):
            seconds = plan.cycle_seconds(config.objective.updates) if plan.fits else None
            hours = None if seconds is None else config.run.cycles * seconds / share_of_peak / 3600
            peak = None if plan.peak is None else plan.peak / 1e9
            return Estimate(True, plan.fits, hours, peak, plan.limit / 1e9)
    return Estimate(False)


def shown(found: Estimate) -> str:
    """An estimate in a few words."""
    if not found.planned:
        return "not planned yet"
    peak = "?" if found.peak_gb is None else f"{found.peak_gb:.1f}"
    if not found.fits:
        return f"does not fit: {peak} of {found.limit_gb:.1f} GB"
    hours = "? h" if found.hours is None else f"{found.hours:,.0f} h" if found.hours >= 10 else f"{found.hours:.1f} h"
    return f"{hours}, {peak} of {found.limit_gb:.1f} GB"
