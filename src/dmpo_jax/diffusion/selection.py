"""Which masked positions of a block to commit at a denoising step: pure array rules."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def transfer_schedule(masked: int, steps: int) -> list[int]:
    """Tokens to commit at each of `steps` steps: masked // steps each, one more in the first masked % steps."""
    return [masked // steps + (step < masked % steps) for step in range(steps)]


def rounded_schedule(masked: int, steps: int) -> list[int]:
    """Of what remains, an equal share of the remaining steps, rounded half to even; empty steps are left out (dllm)."""
    counts = []
    for step in range(steps):
        counts.append(min(round((masked - sum(counts)) / (steps - step)), masked - sum(counts)))
    return [count for count in counts if count]


def dream_schedule(masked: int, steps: int, last_level: float = 1e-3) -> list[int]:
    """Dream's: of what remains, the share by which the noise level falls, cut to an integer; the last step takes all.

    An empty step stays in the list.
    """
    share = dream_shares(steps, last_level)
    counts = []
    for step in range(steps):
        remaining = masked - sum(counts)
        counts.append(remaining if step == steps - 1 else int(np.float32(remaining) * share[step]))
    return counts


def dream_shares(steps: int, last_level: float = 1e-3) -> np.ndarray:
    """fp32 `[steps]`: probability with which Dream's `origin` commits a masked position at each step; 1 at the last."""
    level = np.linspace(1.0, last_level, steps + 1).astype(np.float32)
    share = np.float32(1) - level[1:] / level[:-1]
    share[-1] = 1.0
    return share


_LOWEST = float(np.finfo(np.float32).min)

SCHEDULES: dict[str, Callable[[int, int], list[int]]] = {
    "even": transfer_schedule,
    "rounded": rounded_schedule,
    "dream": dream_schedule,
}


def ranks(score: jax.Array, allowed: jax.Array) -> jax.Array:
    """int32 `[B, W]`: 0 for the best-scored allowed position of a row; ties go to the lowest index, the rest come last."""
    score = jnp.where(allowed, jnp.maximum(score, _LOWEST), -jnp.inf)  # what is not allowed comes after any score
    order = jnp.argsort(-score, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1)


def top_ranked(score: jax.Array, allowed: jax.Array, count: jax.Array | int) -> jax.Array:
    """bool `[B, W]`: the `count` best-scored allowed positions of each row; ties go to the lowest index."""
    return (ranks(score, allowed) < count) & allowed


class Candidates(NamedTuple):
    """What a rule may look at, for a block of W positions.

    score `f32[B, W]` ranks (higher first); probability `f32[B, W]` of each proposal; entropy `f32[B, W]` in nats, or None
    where no rule asks for it; allowed `bool[B, W]`, the masked positions; count, how many the schedule asks for.
    """

    score: jax.Array
    probability: jax.Array
    entropy: jax.Array | None
    allowed: jax.Array
    count: jax.Array


def _longest_prefix(c: Candidates, good: Callable[[jax.Array, jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """The longest run from the best-ranked position on for which `good(values in that order, index)`; at least one."""
    rank = ranks(c.score, c.allowed)
    order = jnp.argsort(rank, axis=-1)
    index = jnp.arange(rank.shape[-1])
    fine = good(jnp.take_along_axis(values, order, axis=-1), index) | (index == 0)
    fine &= index < jnp.sum(c.allowed, axis=-1, keepdims=True)
    return (rank < jnp.sum(jnp.cumprod(fine, axis=-1), axis=-1, keepdims=True)) & c.allowed


def by_schedule(c: Candidates, level: float) -> jax.Array:
    """As many as the schedule says."""
    return top_ranked(c.score, c.allowed, c.count)


def by_threshold(c: Candidates, level: jax.Array | float) -> jax.Array:
    """All with probability of at least `level`, and the best one (Fast-dLLM, arXiv 2505.22618)."""
    return c.allowed & (c.probability >= level) | top_ranked(c.score, c.allowed, 1)


def by_dynamic(c: Candidates, level: float) -> jax.Array:
    """All with probability above `level` if they are as many as the schedule asks for, else what it asks for (SDAR)."""
    sure = c.allowed & (c.probability > level)
    enough = jnp.sum(sure, axis=-1, keepdims=True) >= c.count
    return jnp.where(enough, sure, top_ranked(c.score, c.allowed, c.count))


def by_factor(c: Candidates, level: float) -> jax.Array:
    """The longest prefix whose k-th probability, from k = 0, is at least 1 - level / (k + 2) (Fast-dLLM)."""
    return _longest_prefix(c, lambda p, k: p >= 1 - level / (k + 2), c.probability)


def by_published_factor(c: Candidates, level: float) -> jax.Array:
    """`by_factor` as its official code counts: where only the last of the masked positions fails, it is taken too."""
    found = by_factor(c, level)
    one_left = jnp.sum(c.allowed, axis=-1) - jnp.sum(found, axis=-1) == 1
    return jnp.where(one_left[:, None], c.allowed, found)


def by_frechet(c: Candidates, level: float) -> jax.Array:
    """The longest prefix with sum of the first k + 1 probabilities - (k + 1) + the k-th > level: the Frechet lower bound
    on all being right together, with the least sure one as margin (Fast-dLLM++)."""
    return _longest_prefix(c, lambda p, k: jnp.cumsum(p, axis=-1) - (k + 1) + p > level, c.probability)


def by_entropy_bound(c: Candidates, level: float) -> jax.Array:
    """The longest prefix whose sum of entropies, less the largest, is at most `level` nats (EB-Sampler, arXiv 2505.24857)."""
    bounded = lambda h, k: jnp.cumsum(h, axis=-1) - jax.lax.cummax(h, axis=h.ndim - 1) <= level  # noqa: E731
    return _longest_prefix(c, bounded, c.entropy)


def by_entropy_sum(c: Candidates, level: float) -> jax.Array:
    """The longest prefix whose whole sum of entropies is below `level` nats (SDAR's entropy_bounded)."""
    return _longest_prefix(c, lambda h, k: jnp.cumsum(h, axis=-1) < level, c.entropy)


def by_run(c: Candidates, level: float) -> jax.Array:
    """From the first masked position on, as long as every probability is at least `level`; at least one."""
    return _longest_prefix(c._replace(score=_leftness(c.allowed)), lambda p, k: p >= level, c.probability)


def _leftness(allowed: jax.Array) -> jax.Array:
    return jnp.broadcast_to(-jnp.arange(allowed.shape[-1], dtype=jnp.float32), allowed.shape)


# Each takes (candidates, level); `level` is the number that sampler.level sets.
COMMIT_RULES: dict[str, Callable[[Candidates, float], jax.Array]] = {
    "schedule": by_schedule,
    "threshold": by_threshold,
    "dynamic": by_dynamic,
    "factor": by_factor,
    "published_factor": by_published_factor,
    "frechet": by_frechet,
    "entropy_bound": by_entropy_bound,
    "entropy_sum": by_entropy_sum,
    "run": by_run,
}


class Revision(NamedTuple):
    """WINO's memory of a block: which positions may be revoked `bool[B, W]`, and how many it committed last `int32[B]`."""

    open: jax.Array
    last: jax.Array


def wide_in_narrow_out(
    c: Candidates, check: jax.Array, memory: Revision, accept: float, revoke: float
) -> tuple[jax.Array, jax.Array, Revision]:
    """(commit, revoke, memory) `bool[B, W]` of one WINO iteration (arXiv 2507.18578).

    Commits what is surer than `accept`, at least one and at most 70 % of the masked positions within 5..20; then takes
    back tokens of earlier iterations whose probability `check f32[B, W]`, with themselves hidden, is below `revoke`, but
    fewer than were committed last time, so that a block of W ends within W iterations.
    """
    masked = jnp.sum(c.allowed, axis=-1, keepdims=True)
    most = jnp.clip(masked * 7 // 10, 5, 20)
    count = jnp.clip(jnp.sum(c.allowed & (c.probability > accept), axis=-1, keepdims=True), 1, most)
    commit = top_ranked(c.probability, c.allowed, count)
    committed = jnp.sum(commit, axis=-1)
    doubtful = memory.open & (check < revoke) & (committed > 1)[:, None]
    taken_back = top_ranked(-check, doubtful, memory.last[:, None] - 1)
    return commit, taken_back, Revision((memory.open | commit) & ~taken_back, committed)
