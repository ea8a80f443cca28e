"""Warnings about runs that go on without learning anything."""

from collections import deque

import numpy as np

PATIENCE = 5  # cycles in a row


class Alarms:
    """Watches the cycles of a run and words each kind of trouble once."""

    def __init__(self):
        """Nothing seen yet."""
        self._recent: dict[str, deque[bool]] = {}
        self._said: set[str] = set()

    def check(self, metrics: dict[str, float], completion: np.ndarray) -> list[str]:
        """New warnings after a cycle with these metrics and completions `int32[P, N, L]`."""
        share = np.bincount(completion.ravel()).max() / completion.size
        unfinished, dead = metrics["completion_unfinished"], metrics.get("reward/zero_std_groups", 0.0)
        signs = {
            "unfinished": (
                unfinished > 0.5,
                f"{unfinished:.0%} of the completions do not end: raise rollout.completion_length",
            ),
            "dead groups": (
                dead > 0.9,
                f"{dead:.0%} of the groups earn equal rewards and teach nothing: raise rollout.group or "
                "sampler.temperature, or choose easier examples",
            ),
            "one token": (
                share > 0.9,
                f"one token makes up {share:.0%} of the completions: the policy has probably collapsed; "
                "lower optimizer.learning_rate",
            ),
        }
        return [text for name, (sign, text) in signs.items() if self._persists(name, sign)]

    def _persists(self, name: str, sign: bool) -> bool:
        recent = self._recent.setdefault(name, deque(maxlen=PATIENCE))
        recent.append(bool(sign))
        if name in self._said or len(recent) < PATIENCE or not all(recent):
            return False
        self._said.add(name)
        return True
