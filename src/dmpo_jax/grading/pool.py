"""Worker processes that grade answers on the host, each answer within hard limits of time and memory.

A worker (`worker.py`) is a Python of its own, without JAX and without devices. Whatever happens in one (an endless loop in
one big-integer call, memory that runs away, a crash of a library) costs that answer's verdict and a new worker, nothing else.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from dmpo_jax.errors import UserError, one_line

MOST_WORKERS = 16
START_SECONDS = 120.0  # a cold disk may need most of it for the imports
REPLY_BYTES = 1_000_000


class Verdict(NamedTuple):
    """Components of one graded answer, or why there are none; and the seconds that it took."""

    values: dict[str, float] | None
    failure: str
    seconds: float


class GraderPool:
    """Grades in worker processes; a context manager. Workers start when they are first needed."""

    def __init__(self, arguments: Sequence[str], seconds: float, workers: int = 0):
        """`arguments` say to `worker.py` what grades; `seconds` are allowed an answer; workers = 0: one a core, at most 16."""
        self._arguments, self._seconds = tuple(arguments), seconds
        self._count = workers or min(os.cpu_count() or 1, MOST_WORKERS)
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers."""
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        while not self._idle.empty():
            self._idle.get().end()

    def grade(self, requests: Sequence[dict[str, Any]]) -> list[Verdict]:
        """One verdict for each request, in order. Raises UserError where a worker cannot even start."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="grader")
        return list(self._threads.map(self._grade, requests))

    def _grade(self, request: dict[str, Any]) -> Verdict:
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self._arguments, self._seconds)
        start = time.monotonic()
        reply = worker.ask(request, self._seconds)
        seconds = time.monotonic() - start
        if worker.alive:
            self._idle.put(worker)
        else:
            worker.end()
        if "values" in reply:
            return Verdict(reply["values"], "", seconds)
        return Verdict(None, reply["failure"], seconds)


def ask_once(
    arguments: Sequence[str], request: dict[str, Any], seconds: float, most: int = REPLY_BYTES
) -> dict[str, Any]:
    """The reply of a worker started for one request; {"failure": ...} where it gave none of at most `most` bytes in time."""
    worker = _Worker(arguments, seconds)
    try:
        return worker.ask(request, seconds, most)
    finally:
        worker.end()


class _Worker:
    def __init__(self, arguments: Sequence[str], seconds: float):
        command = [sys.executable, "-m", "dmpo_jax.grading.worker", str(seconds), *arguments]
        # In a session of its own: an interrupt from the keyboard is the run's affair.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.alive = True
        ready = self._within(START_SECONDS, lambda: self._read(REPLY_BYTES))
        if ready is None or "failure" in ready:
            self.end()
            why = ready["failure"] if ready else f"it did not answer within {START_SECONDS:g} s"
            raise UserError(f"the grader of {' '.join(arguments)} cannot start: {why}")

    def ask(self, request: dict[str, Any], seconds: float, most: int = REPLY_BYTES) -> dict[str, Any]:
        """{"values": ...} or another reply of `worker.py`, or {"failure": why}; afterwards the worker may be dead."""
        reply = self._within(seconds, lambda: self._send(request) and self._read(most))
        if reply is not None:
            return reply
        self.alive = False
        code = self._process.wait()
        return {"failure": f"no verdict within {seconds:g} s" if self._late else f"its process died (exit code {code})"}

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _within(self, seconds: float, talk):
        """What `talk` returns; None if the process had to be killed, or died, before."""
        self._late = False

        def kill() -> None:
            self._late = True
            self._process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            return talk()
        except OSError:  # the pipe of a dead process
            return None
        finally:
            timer.cancel()

    def _send(self, request: dict[str, Any]) -> bool:
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return True

    def _read(self, most: int) -> dict[str, Any] | None:
        line = self._process.stdout.readline(most)
        if not line.endswith(b"\n"):
            self._process.kill()  # it died, or says more than any grader has to say
            return None
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        return reply if isinstance(reply, dict) else {"failure": f"it said {one_line(line[:80])}"}
