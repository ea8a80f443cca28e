"""The paper's claims put to our own runs: verdicts that follow from intervals.

baseline (with, without): shown where the gain of `with` is above 0 with its whole interval and that of `without` is not.
reuse (few, many): shown where the gain of `many` is above 0 with its whole interval and `many` is not worse than `few`, the
interval of their difference reaching 0.
cache (full, cached; bench full, bench cached): shown where the interval of the difference holds 0 and a cached rollout takes
less time. Exact solves of held-out items, seeds pooled; 95 %, Newcombe's for gains and differences.
"""

import dataclasses
from collections.abc import Mapping

from dmpo_jax.evaluation.comparison import Recipe
from dmpo_jax.evaluation.intervals import newcombe
from dmpo_jax.reproduction.document import Table, points
from dmpo_jax.reproduction.manifest import Claim

SHOWS, DOES_NOT, NOT_RUN = "shows", "does not show", "not run"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One claim's verdict and the figures that it follows from."""

    claim: Claim
    verdict: str
    figures: str
    items: int = 0


def judge(claim: Claim, found: Mapping[str, Recipe], rollout_seconds: Mapping[str, float]) -> Verdict:
    """The verdict on a claim from recipes by name and the median seconds of a rollout by bench."""
    missing = [name for name in claim.runs if name not in found]
    missing += [name for name in claim.bench if name not in rollout_seconds]
    if missing:
        return Verdict(claim, NOT_RUN, f"{', '.join(missing)} not finished")
    first, second = (found[name] for name in claim.runs[:2])
    rule = {"baseline": _baseline, "reuse": _reuse, "cache": _cache}[claim.kind]
    shown, figures = rule(first, second, [rollout_seconds[name] for name in claim.bench])
    return Verdict(claim, SHOWS if shown else DOES_NOT, figures, min(first.items, second.items))


def _gain(recipe: Recipe) -> tuple[float, tuple[float, float]]:
    n, before, after = recipe.items, recipe.solved("before"), recipe.solved("after")
    return (after - before) / n, newcombe(after, n, before, n)


def _difference(first: Recipe, second: Recipe) -> tuple[float, tuple[float, float]]:
    """Exact solves of the second less those of the first."""
    (a, n), (b, m) = ((recipe.solved("after"), recipe.items) for recipe in (first, second))
    return b / m - a / n, newcombe(b, m, a, n)


def _named(recipe: Recipe) -> str:
    return f"{recipe.name}: gain {points(*_gain(recipe))} points over {len(recipe.runs)} seeds"


def _baseline(first: Recipe, second: Recipe, _: list[float]) -> tuple[bool, str]:
    shown = _gain(first)[1][0] > 0 and _gain(second)[1][0] <= 0
    return shown, f"{_named(first)}; {_named(second)}; difference {points(*_difference(first, second))}"


def _reuse(first: Recipe, second: Recipe, _: list[float]) -> tuple[bool, str]:
    apart = _difference(first, second)
    lowest = min(run.after.exact - run.before.exact for run in second.runs)
    shown = _gain(second)[1][0] > 0 and apart[1][1] >= 0
    return shown, (
        f"{_named(first)}; {_named(second)}, lowest seed {points(lowest)}; difference {points(*apart)}; "
        f"{_cost(first)} against {_cost(second)}"
    )


def _cost(recipe: Recipe) -> str:
    cycles, updates = recipe.settings["run"]["cycles"], recipe.settings["objective"]["updates"]
    return f"{cycles} rollouts x {updates} updates"


def _cache(first: Recipe, second: Recipe, seconds: list[float]) -> tuple[bool, str]:
    apart, (full, cached) = _difference(first, second), seconds
    shown = apart[1][0] <= 0 <= apart[1][1] and cached < full
    return shown, (
        f"difference {points(*apart)} points; a rollout takes {full:.2f} s without and {cached:.2f} s with the cache "
        f"({full / cached:.2f} times as fast)"
    )


def table_of(verdicts: list[Verdict]) -> Table:
    """The verdicts as a table."""
    return Table(
        "Claims of the paper",
        ("claim", "published in", "verdict here", "figures", "items"),
        tuple((v.claim.text, v.claim.source, v.verdict, v.figures, str(v.items) if v.items else "") for v in verdicts),
        words=4,
        notes=(
            "A verdict follows from intervals of 95 % over the pooled test items of all seeds, which do not cover how runs of "
            "other seeds would differ. No gain seen is no proof of no gain. This is a denoiser of 204,736 parameters on 4x4 "
            "Sudoku, not the paper's models.",
            "Without and with a baseline: the gain with one is above 0, that without is not. Reuse: it gains, and is not "
            "worse. Cache: the difference's interval holds 0, and a rollout takes less time (one bench, the median of 3).",
        ),
    )
