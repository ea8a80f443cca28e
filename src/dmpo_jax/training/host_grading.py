"""Grading by worker processes in a run: every process of the run grades a share of the answers and gets all verdicts."""

import contextlib
import sys
import time
from typing import NamedTuple

import numpy as np

from dmpo_jax.errors import one_line
from dmpo_jax.grading.pool import GraderPool
from dmpo_jax.parallel import distributed
from dmpo_jax.training.setup import Setup

MOST_TOLD = 5  # different reasons why answers have no verdict that are printed
TOLD_CHARACTERS = 200


class Graded(NamedTuple):
    """Components `f32[B]` by name, NaN where there is no verdict; why not, "" where there is one; and what it cost."""

    components: dict[str, np.ndarray]
    failures: list[str]
    seconds: float
    slowest: float

    @property
    def metrics(self) -> dict[str, np.float32]:
        """What a cycle reports of it: answers without a verdict, seconds in all and of the slowest answer."""
        failed = sum(map(bool, self.failures))
        values = {"grader/failed": failed, "grader/slowest_s": self.slowest, "time/grading_s": self.seconds}
        return {name: np.float32(value) for name, value in values.items()}


class HostGrader:
    """The worker processes of a run's task, which has no device grader; a context manager."""

    def __init__(self, setup: Setup):
        """Starts nothing yet."""
        config = setup.config.task
        self._setup = setup
        self._pool = GraderPool(setup.task.worker, config.grading_seconds, config.grading_workers)
        self._calls, self._told = 0, set()

    def __enter__(self) -> "HostGrader":
        return self

    def __exit__(self, *_) -> None:
        self._pool.close()

    def grade(self, texts: list[str], features: dict[str, np.ndarray]) -> Graded:
        """Verdicts on B texts; features lead with B. Of several processes all must call it with the same."""
        start, count = time.monotonic(), distributed.count()
        mine = range(distributed.index() * len(texts) // count, (distributed.index() + 1) * len(texts) // count)
        requests = [self._setup.task.request(texts[i], {k: v[i] for k, v in features.items()}) for i in mine]
        verdicts = [tuple(verdict) for verdict in self._pool.grade(requests)]
        self._calls += 1
        shared = distributed.share(f"grades/{self._calls}", verdicts)
        values, failures, seconds = zip(*(verdict for part in shared for verdict in part), strict=True)
        components = {
            name: np.array([v.get(name, np.nan) if v else np.nan for v in values], np.float32)
            for name in self._setup.task.components
        }
        self._tell(failures)
        return Graded(components, list(failures), time.monotonic() - start, max(seconds))

    def _tell(self, failures: tuple[str, ...]) -> None:
        for failure in dict.fromkeys(filter(None, failures)):
            if failure not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(failure)
                text = f"warning: an answer has no verdict: {one_line(failure[:TOLD_CHARACTERS])}"
                distributed.say(f"{text}; grader/failed counts them", file=sys.stderr)


def host_grader(setup: Setup) -> contextlib.AbstractContextManager[HostGrader | None]:
    """The grader of a task that needs one; None for a task that devices grade."""
    return HostGrader(setup) if setup.task.grade_bytes is None else contextlib.nullcontext()
