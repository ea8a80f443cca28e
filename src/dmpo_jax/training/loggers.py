"""Metrics to TensorBoard and Weights & Biases. A logger that fails is switched off with one warning; it stops nothing."""

import importlib.util
import math
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dmpo_jax.config import LoggingConfig
from dmpo_jax.errors import UserError, one_line

PATIENCE_S = 60.0  # for a logger that talks to a network, once at its start and once at its end
NEEDED = {  # key of [logging] -> (what is imported, how to get it)
    "tensorboard": ("tensorboard", "pip install tensorboard"),
    "wandb": ("wandb", "pip install wandb"),
}


class Logger(Protocol):
    """What takes the metrics of a cycle."""

    def write(self, cycle: int, entry: dict[str, float]) -> None:
        """One cycle's numbers, by name."""

    def close(self) -> None:
        """Writes what is left."""


def check_loggers(config: LoggingConfig) -> None:
    """Raises UserError when a logger is asked for whose package is not installed. Imports and touches nothing."""
    for key, (package, remedy) in NEEDED.items():
        wanted = getattr(config, key)
        if wanted and package not in sys.modules and importlib.util.find_spec(package) is None:
            value = "true" if wanted is True else f'"{wanted}"'
            raise UserError(
                f"logging.{key} = {value}: the package {package} is not installed; {remedy}, or leave it out"
            )


class Loggers:
    """Every logger that `[logging]` asks for, behind one `write`."""

    def __init__(self, config: LoggingConfig, run_dir: Path, resolved: dict[str, Any], resume_after: int):
        """Opens them for cycles after `resume_after`; `resolved` holds all settings, by section.

        Raises UserError as `check_loggers` does, and nothing else.
        """
        check_loggers(config)
        self._loggers: dict[str, Logger] = {}
        if config.tensorboard:
            self._open("tensorboard", lambda: TensorBoard(run_dir / "tensorboard", resume_after))
        if config.wandb:
            self._open("wandb", lambda: WeightsAndBiases(config.wandb, run_dir, resolved))

    def write(self, cycle: int, entry: dict[str, float]) -> None:
        """Hands one cycle's numbers on; what is no finite number is left out."""
        numbers = {
            key: float(value)
            for key, value in entry.items()
            if isinstance(value, int | float) and math.isfinite(value) and key != "cycle"
        }
        for name, logger in list(self._loggers.items()):
            self._guarded(name, lambda logger=logger: logger.write(cycle, numbers))

    def close(self) -> None:
        """Closes all of them; a second call does nothing."""
        for name, logger in list(self._loggers.items()):
            self._guarded(name, logger.close)
        self._loggers.clear()

    def _open(self, name: str, make: Callable[[], Logger]) -> None:
        def opened() -> None:
            self._loggers[name] = make()

        self._guarded(name, opened)

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._loggers.pop(name, None)
            what = one_line(f"{type(error).__name__}: {error}")[:300]
            print(f"warning: logging.{name} is switched off: {what}", file=sys.stderr, flush=True)


class TensorBoard:
    """Event files. TensorBoard is told to forget what an earlier start logged after the cycle that this one resumes at."""

    def __init__(self, folder: Path, resume_after: int):
        """A new event file in `folder`. Raises OSError."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        # Readers take files in the order of their names.
        path = folder / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self._write(step=resume_after + 1, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()  # what fails does so here and now, in no thread

    def write(self, cycle: int, entry: dict[str, float]) -> None:
        """One event with all numbers."""
        values = [self._summary.Value(tag=key, simple_value=value) for key, value in entry.items()]
        self._write(step=cycle, summary=self._summary(value=values))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class WeightsAndBiases:
    """One W&B run for one run folder, over all of its starts; its id is kept in `wandb.id`."""

    def __init__(self, project: str, run_dir: Path, resolved: dict[str, Any]):
        """Starts or goes on with the run. Raises what wandb does, TimeoutError where it does nothing."""
        path = run_dir / "wandb.id"
        known = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        name = known or uuid.uuid4().hex[:12]
        self._run = within(PATIENCE_S, lambda: _start(project, name, run_dir, resolved))
        if not known:
            path.write_text(name + "\n", encoding="utf-8")
        self._logged = int(getattr(self._run, "step", 0) or 0) - 1 if known else 0  # the last cycle that W&B has

    def write(self, cycle: int, entry: dict[str, float]) -> None:
        """One step; a cycle that W&B has already is the same as before and is not sent again."""
        if cycle > self._logged:
            self._run.log(entry, step=cycle)

    def close(self) -> None:
        """Waits for the upload, but not for ever."""
        within(PATIENCE_S, self._run.finish)


def _start(project: str, name: str, run_dir: Path, resolved: dict[str, Any]):
    import wandb

    return wandb.init(project=project, id=name, name=run_dir.name, dir=str(run_dir), config=resolved, resume="allow")


def within(seconds: float, action: Callable[[], Any]) -> Any:
    """The action's result or exception. Raises TimeoutError after so many seconds and leaves it to itself."""
    outcome: list[tuple[Any, BaseException | None]] = []

    def attempt() -> None:
        try:
            outcome.append((action(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
