"""A run that gets nowhere ends, instead of holding its machines for ever."""

import faulthandler
import os
import sys
import threading
import time

HUNG = 70  # the exit code


class Watchdog:
    """Ends the process when two signs of progress lie too far apart.

    The end of a compilation, cycle, batch of an evaluation or save is a sign. As a `with` block: it watches inside.
    """

    def __init__(self, minutes: float):
        """The longest that any one of these may take; 0: any time."""
        self._limit, self._over = 60 * minutes, threading.Event()
        self._what, self._last = "the start", time.monotonic()

    def done(self, what: str) -> None:
        """Notes that `what` has just ended."""
        self._what, self._last = what, time.monotonic()

    def __enter__(self) -> "Watchdog":
        if self._limit:
            self.done("the start")
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(self._limit / 10, 10.0)):
            seconds = time.monotonic() - self._last
            if seconds > self._limit:
                sys.stdout.flush()
                faulthandler.dump_traceback(file=2, all_threads=True)
                os.write(
                    2,
                    f"dmpo: nothing has ended for {seconds / 60:.1f} minutes since {self._what}, more than run.watchdog = "
                    f"{self._limit / 60:g}: giving up; the same command goes on from the newest checkpoint\n".encode(),
                )
                os._exit(HUNG)
