"""Where the commands run: on this machine, a Cloud TPU slice, GKE or Slurm, each by the launcher that is there for it."""

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from dmpo_jax.errors import UserError
from dmpo_jax.reproduction.manifest import Hardware

TARGETS = ("local", "tpu-vm", "gke", "slurm")
DEFAULT_HARDWARE = {"local": "h100-8", "tpu-vm": "v5e-16", "gke": "v5e-16", "slurm": "h100-8"}


@dataclasses.dataclass(frozen=True)
class Target:
    """How commands are made for a place. `dmpo`: the words that start it on this machine."""

    name: str
    dmpo: tuple[str, ...]
    hardware: Hardware | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def evaluates(self) -> bool:
        """Whether evaluations run here too; they are those of `dmpo eval`, one process on this file system."""
        return self.name in ("local", "slurm")

    @property
    def marks(self) -> bool:
        """Whether run folders lie where this machine may not see them."""
        return self.name in ("tpu-vm", "gke")

    def seen(self, folder: Path) -> Path:
        """A run folder as the processes of a run name it."""
        if self.name == "gke":
            return Path("/bucket") / folder
        return Path("bucket") / folder if self.name == "tpu-vm" and folder.parts[:1] != ("bucket",) else folder

    def train(self, name: str, config: str, folder: Path, options: Sequence[str]) -> list[str]:
        """The command of a training, which ends when the training has (GKE: when it is submitted)."""
        if self.name == "tpu-vm":
            return [
                "launch/tpu-vm",
                "--type",
                self.hardware.tpu_type,
                "run",
                config,
                "--run-dir",
                str(folder),
                *options,
            ]
        if self.name == "gke":
            image, bucket = (self.environment.get(key, default) for key, default in _GKE.items())
            place = str(folder.relative_to("/bucket"))
            job = "".join(c if c.isalnum() else "-" for c in name.lower())
            return [
                "launch/gke/submit", self.hardware.gke[0], "--name", job, "--image", image,
                "--run-dir", f"gs://{bucket}/{place}", *self.hardware.gke[1:], config, *options,
            ]  # fmt: skip
        if self.name == "slurm":
            return [*_sbatch(name), "launch/slurm.sbatch", config, "--run-dir", str(folder), *options]
        return [*self.dmpo, "train", config, "--run-dir", str(folder), *options]

    def evaluate(self, name: str, config: str, options: Sequence[str]) -> list[str]:
        """The command of an evaluation."""
        command = [*self.dmpo, "eval", config, *options]
        if self.name == "slurm":
            return [*_sbatch(name), "--ntasks-per-node=1", "--gpus-per-node=8", "--wrap", shlex.join(command)]
        return command


_GKE = {"GKE_IMAGE": "IMAGE", "GKE_BUCKET": "BUCKET"}


def _sbatch(name: str) -> list[str]:
    # Of a name one job runs at a time: should an earlier start have left one, this one waits and then finds it done.
    return ["sbatch", "--wait", "--nodes=1", f"--job-name={name}", "--dependency=singleton"]


def make_target(name: str, hardware: Hardware | None, environment: Mapping[str, str], dry_run: bool) -> Target:
    """Raises UserError where the environment lacks what the target's launcher needs, or the hardware is of another kind."""
    dmpo = tuple(shlex.split(environment.get("DMPO", ""))) or ("dmpo",)
    needed = {"tpu-vm": ("TPU_BUCKET",), "gke": tuple(_GKE)}.get(name, ())
    missing = [key for key in needed if not environment.get(key)]
    if missing and not dry_run:
        raise UserError(f"--target {name}: {missing[0]} is not set in the environment; see launch/README.md")
    for target, key in (("tpu-vm", "tpu_type"), ("gke", "gke")):
        if name == target and hardware and not getattr(hardware, key):
            raise UserError(f"--hardware: {hardware.title} is not for --target {name}; choose another")
    return Target(name, dmpo, hardware, environment)


def child_variables() -> dict[str, str]:
    """Variables of a child over its parent's: one CPU device, as the recipes were timed; a second made no run faster."""
    return {} if "JAX_NUM_CPU_DEVICES" in os.environ else {"JAX_NUM_CPU_DEVICES": "1"}
