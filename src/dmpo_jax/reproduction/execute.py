"""Steps run to their ends, some at a time, as children that do not outlive this process.

A child has a process group of its own, so that Ctrl-C reaches it through `execute` alone, which asks it to stop (a training
saves) and ends it after `GRACE` seconds or at a second signal. Should this process be killed outright, the kernel kills its
children (Linux), and a lock that they inherit keeps a second start waiting until they are gone.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dmpo_jax.errors import UserError, one_line
from dmpo_jax.reproduction.progress import is_finished
from dmpo_jax.reproduction.steps import Step

GRACE = 120.0  # seconds that a child may take to save
POLL = 0.1
PR_SET_PDEATHSIG = 1
TAIL = 4096  # bytes of a log in which the last line is looked for


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of the steps: names of those that failed, with the reason, and the signal that stopped all, or 0."""

    failed: dict[str, str]
    stopped: int = 0

    @property
    def code(self) -> int:
        """The exit code: 0, 1 where something failed, 128 and more after a signal."""
        return 128 + self.stopped if self.stopped else int(bool(self.failed))


def shares_of(jobs: int) -> list[tuple[int, ...] | None]:
    """The cores that each of so many children is held to; of one child, none. Raises UserError where there are too few."""
    if jobs == 1:
        return [None]
    if not hasattr(os, "sched_getaffinity"):
        raise UserError(f"--jobs {jobs}: this system cannot hold a process to some of its cores; leave it out")
    cores = sorted(os.sched_getaffinity(0))
    if jobs > len(cores):
        raise UserError(f"--jobs {jobs}: there are {len(cores)} cores, and every run needs one; use that many at most")
    cuts = [len(cores) * i // jobs for i in range(jobs + 1)]
    return [tuple(cores[a:b]) for a, b in itertools.pairwise(cuts)]


def locked(folder: Path, patience: float = GRACE) -> int:
    """A descriptor that holds the folder's lock, to be inherited. Raises UserError where another start is at work there."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + patience
    waiting = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > until:
                os.close(lock)
                raise UserError(
                    f"{folder}: another launch/reproduce, or a run that one left, is at work there; wait for it or end it"
                ) from None
            if not waiting:
                print(f"{folder}: waiting for what an earlier start left running", file=sys.stderr, flush=True)
                waiting = True
            time.sleep(POLL)
        else:
            return lock


@dataclasses.dataclass
class _Child:
    step: Step
    process: subprocess.Popen
    share: tuple[int, ...] | None
    started: float
    from_byte: int  # of the log


def execute(
    steps: Sequence[Step],
    shares: Sequence[tuple[int, ...] | None],
    logs: Path,
    variables: dict[str, str],
    lock: int,
    say: Callable[[str], None] = lambda text: print(text, flush=True),
) -> Outcome:
    """Runs what is not finished, in order, as many at a time as there are shares of the machine.

    A failure keeps the steps that need it from running, and no others. The output of a step goes to `logs/NAME.log`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    signals: list[int] = []
    previous = {
        number: signal.signal(number, lambda n, _: signals.append(n)) for number in (signal.SIGINT, signal.SIGTERM)
    }
    waiting, free, running = list(steps), list(shares), []
    done: set[str] = set()
    failed: dict[str, str] = {}
    place = {step.name: f"[{i}/{len(steps)}]" for i, step in enumerate(steps, 1)}
    asked = 0.0  # when the children were first asked to stop
    try:
        while running or (waiting and not signals):
            while free and not signals and (step := _next(waiting, done, failed, place, say)):
                share = free.pop(0)
                running.append(_start(step, share, logs, variables, lock))
                say(f"{place[step.name]} {step.name}: {shown_command(step)}")
            for child in [c for c in running if c.process.poll() is not None]:
                running.remove(child)
                free.append(child.share)
                _signal(child, signal.SIGKILL)  # what it may have left in its group
                reason = _judge(child, logs)
                took = time.monotonic() - child.started
                if reason:
                    if not signals:
                        failed[child.step.name] = reason
                    say(f"{place[child.step.name]} {child.step.name}: {'stopped' if signals else 'FAILED'}: {reason}")
                else:
                    done.add(child.step.name)
                    say(f"{place[child.step.name]} {child.step.name}: done in {took:.0f} s")
            if signals and running:
                if not asked:
                    asked = time.monotonic()
                    say(f"stopping {', '.join(c.step.name for c in running)}; the same command goes on from there")
                    for child in running:
                        child.process.terminate()
                elif len(signals) > 1 or time.monotonic() - asked > GRACE:
                    for child in running:
                        _signal(child, signal.SIGKILL)
            time.sleep(POLL)
    finally:
        for child in running:
            _signal(child, signal.SIGKILL)
            child.process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return Outcome(failed, signals[0] if signals else 0)


def _next(waiting: list[Step], done: set[str], failed: dict[str, str], place: dict[str, str], say: Any) -> Step | None:
    """The first step that can run now, taken off the list; what is finished or cannot run any more is taken off too."""
    for step in list(waiting):
        lost = [need for need in step.needs if need in failed]
        try:
            finished = not lost and is_finished(step)
        except UserError as error:
            finished, lost = False, [str(error)]
            failed[step.name] = str(error)
        if finished:
            say(f"{place[step.name]} {step.name}: finished before")
            done.add(step.name)
        elif lost:
            failed.setdefault(step.name, f"not run, as {lost[0]} failed")
            say(f"{place[step.name]} {step.name}: {failed[step.name]}")
        elif not all(need in done for need in step.needs):
            continue
        waiting.remove(step)
        if not (finished or lost):
            return step
    return None


def _start(step: Step, share: tuple[int, ...] | None, logs: Path, variables: dict[str, str], lock: int) -> _Child:
    step.done.parent.parent.mkdir(parents=True, exist_ok=True)
    if step.kind != "train" or step.marked:
        step.done.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()

    def prepare() -> None:  # in the child, before it becomes the command
        if sys.platform == "linux":
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        if share:
            os.sched_setaffinity(0, share)

    with (logs / f"{step.name}.log").open("ab") as log:
        from_byte = log.tell()
        try:
            process = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
                start_new_session=True,
                pass_fds=(lock,),
                preexec_fn=prepare,
            )
        except OSError as error:
            raise UserError(
                f"{step.command[0]}: cannot be started ({error.strerror}); install it, or run launch/reproduce"
            ) from None
    return _Child(step, process, share, time.monotonic(), from_byte)


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # loaded before any fork


def _judge(child: _Child, logs: Path) -> str:
    """Why a child that has ended did not finish its step; "" where it did."""
    step, code = child.step, child.process.returncode
    if code == 0 and step.marked:
        step.done.write_text(shown_command(step) + "\n", encoding="utf-8")
        return ""
    try:
        if code == 0 and is_finished(step):
            return ""
    except UserError as error:
        return str(error)
    log = logs / f"{step.name}.log"
    if code == 0:
        return f"ended without writing {step.done}; see {log}"
    how = f"signal {-code}" if code < 0 else f"code {code}"
    return f"{how}: {_last_line(log, child.from_byte)} ({log})"


def _last_line(log: Path, from_byte: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(from_byte, size - TAIL))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return one_line(lines[-1].strip())[:300] if lines else "it printed nothing"


def shown_command(step: Step) -> str:
    """The command as a shell reads it back."""
    return shlex.join(step.command)


def _signal(child: _Child, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)
