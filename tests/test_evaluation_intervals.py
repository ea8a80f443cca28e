import math

import numpy as np
import pytest

from dmpo_jax.evaluation.intervals import Z_95, newcombe, wilson


# Newcombe (1998), Statistics in Medicine 17:857, table I, method 3 (score interval), four decimals.
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_published_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5.1e-5)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (3, 7), (41.5, 100), (255, 256), (500, 500)])
def test_wilson_solves_its_quadratic(successes, n):
    share = successes / n
    # (share - p)^2 = z^2 p (1 - p) / n, ordered by powers of p.
    z2 = Z_95**2
    roots = np.roots(np.array([1 + z2 / n, -2 * share - z2 / n, share**2], dtype=np.float64))
    assert wilson(successes, n) == pytest.approx(sorted(roots.real), abs=1e-12)


def test_wilson_edges():
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == 1.0
    low, high = wilson(3, 10)
    assert wilson(7, 10) == pytest.approx((1 - high, 1 - low), abs=1e-15)
    assert wilson(5, 10, z=0.0) == (0.5, 0.5)


@pytest.mark.parametrize(("successes", "n"), [(-1, 10), (11, 10), (1, 0), (math.nan, 10)])
def test_wilson_rejects_impossible_counts(successes, n):
    with pytest.raises(ValueError, match="expected 0 <= successes <= n"):
        wilson(successes, n)


# Newcombe (1998), Statistics in Medicine 17:873, table II, method 10, four decimals.
@pytest.mark.parametrize(
    ("s1", "n1", "s2", "n2", "low", "high"),
    [
        (56, 70, 48, 80, 0.0524, 0.3339),
        (9, 10, 3, 10, 0.1705, 0.8090),
        (6, 7, 2, 7, 0.0582, 0.8062),
        (5, 56, 0, 29, -0.0381, 0.1926),
        (0, 10, 0, 20, -0.1611, 0.2775),
        (0, 10, 0, 10, -0.2775, 0.2775),
        (10, 10, 0, 20, 0.6791, 1.0),
        (10, 10, 0, 10, 0.6075, 1.0),
    ],
)
def test_newcombe_published_values(s1, n1, s2, n2, low, high):
    assert newcombe(s1, n1, s2, n2) == pytest.approx((low, high), abs=5.1e-5)
    assert newcombe(s2, n2, s1, n1) == pytest.approx((-high, -low), abs=5.1e-5)


def test_newcombe_without_data_says_nothing():
    assert newcombe(0, 0, 3, 10) == (-1.0, 1.0)
    assert newcombe(3, 10, 0, 0) == (-1.0, 1.0)
