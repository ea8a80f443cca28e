"""What a run writes as it goes: metrics.jsonl, samples.jsonl, and one line of progress."""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from dmpo_jax.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Replaces a file's content in one step, so that a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def check_output(path: Path, suffix: str) -> None:
    """Raises UserError unless a file of that name can be written; makes the folder it goes into."""
    if path.suffix != suffix or path.is_dir():
        raise UserError(f"--out {path}: expected a file name that ends in {suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(13, "not writable")
    except OSError as error:
        raise UserError(f"--out {path}: its folder cannot be written ({error.strerror}); choose another") from None


class JsonLines:
    """A file of JSON objects, each with its `cycle`; reopening it drops what a resumed run will write again."""

    def __init__(self, path: Path, resume_after: int):
        """Keeps lines up to cycle `resume_after` and appends from there. A last line cut short by a kill is dropped.

        Raises UserError, with the file as it was, when any other line is not such an object.
        """
        kept = []
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = text.split("\n")
        for number, line in enumerate(lines, 1):
            if number == len(lines):  # what follows the last line end: nothing, or a line cut short
                break
            try:
                cycle = json.loads(line)["cycle"]
                earlier = cycle <= resume_after
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{path}, line {number}: {line[:60]!r} is not an object with a cycle number; mend or remove that line"
                ) from None
            if earlier:
                kept.append(line)
        write_text(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8", buffering=1)  # a line is readable once written

    def write(self, entry: dict[str, Any]) -> None:
        """Appends one object; numbers that are not finite become null, which JSON can hold."""
        entry = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def flush(self) -> None:
        """Puts everything written so far on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes and closes."""
        self.flush()
        self._file.close()


class NoLines:
    """What a process that writes nothing has in place of `JsonLines`."""

    def __init__(self, path: Path, resume_after: int):
        """Opens nothing."""

    def write(self, entry: dict[str, Any]) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Progress:
    """One line now and then: where the run is, how it does, and when it ends, counted in completions."""

    def __init__(self, cycles: int, rows: int, unit: str, every_s: float = 5.0):
        """`rows` completions (or examples: `unit`) a cycle."""
        self._cycles, self._rows, self._unit, self._every = cycles, rows, unit, every_s
        self._start, self._first, self._last = time.monotonic(), None, -math.inf

    def show(self, cycle: int, metrics: dict[str, float]) -> None:
        """Prints the line for a finished cycle unless the last one is only seconds old."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, cycle)  # the first cycle compiled; speed is counted from its end
        if now - self._last < self._every and cycle != self._cycles:
            return
        self._last = now
        since, at = self._first
        eta = (now - since) / (cycle - at) * (self._cycles - cycle) if cycle > at else math.nan
        parts = [f"cycle {cycle}/{self._cycles}", f"{cycle * self._rows:,}/{self._cycles * self._rows:,} {self._unit}"]
        for name, label in SHOWN.items():
            if name in metrics:
                parts.append(f"{label} {metrics[name]:.4g}")
        parts.append(f"eta {_clock(eta)}")
        print("  ".join(parts), file=sys.stderr, flush=True)


SHOWN = {
    "loss": "loss",
    "reward/mean": "reward",
    "ess/mean": "ess",
    "log_ratio/std": "log-ratio sd",
    "eval/exact": "exact",
    "eval/accuracy": "accuracy",
}


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
