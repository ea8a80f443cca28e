"""Several sampled answers to each question: pass@k, and how different the answers are."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from dmpo_jax.evaluation.intervals import wilson


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate, from n answers of which some are correct, of how likely one of k is: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, arXiv 2107.03374, eq. 1. Raises ValueError unless 0 <= correct <= n and 1 <= k <= n.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"n, correct, k = {n}, {correct}, {k}: expected 0 <= correct <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def entropy(answers: Sequence[Hashable]) -> float:
    """Entropy in nats of the distribution of the answers given: 0 where all are the same, log n where none is."""
    shares = [count / len(answers) for count in Counter(answers).values()]
    return -sum(share * math.log(share) for share in shares)


def sizes(n: int) -> list[int]:
    """The k that are reported for n answers: 1, 2, 4, ... and n itself."""
    return sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})


def figures(answers: Sequence[Sequence[Hashable]], correct: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Figures of n answers to each item and of which are correct.

    `pass_at` and its 95 % intervals over items by k; means over items of `distinct_answers`, of `distinct_correct`, and of
    `answer_entropy` in nats. Raises ValueError unless every item has the same number of answers, and one at least.
    """
    counts = {len(row) for row in (*answers, *correct)}
    if len(counts) != 1 or 0 in counts or len(answers) != len(correct):
        raise ValueError(f"answers to an item: {sorted(counts)}: expected the same number, above 0, for each")
    (n,), items = counts, len(answers)
    passes = {k: sum(pass_at_k(n, sum(row), k) for row in correct) / items for k in sizes(n)}
    right = [
        {answer for answer, good in zip(*pair, strict=True) if good} for pair in zip(answers, correct, strict=True)
    ]
    return {
        "samples": n,
        "pass_at": {str(k): value for k, value in passes.items()},
        # Estimates lie in [0, 1], so the binomial interval over items is conservative.
        "pass_at_ci95": {str(k): list(wilson(min(value, 1.0) * items, items)) for k, value in passes.items()},
        "distinct_answers": sum(len(set(row)) for row in answers) / items,
        "distinct_correct": sum(map(len, right)) / items,
        "answer_entropy": sum(map(entropy, answers)) / items,
    }
