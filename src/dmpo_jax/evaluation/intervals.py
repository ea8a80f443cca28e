"""Confidence intervals for proportions."""

import math

Z_95 = 1.959964


def wilson(successes: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of the proportion `successes / n`, as fractions in [0, 1]; (0, 1) when n is 0.

    Wilson (1927); equal to the two roots p of `(successes/n - p)^2 = z^2 p (1 - p) / n`. Raises ValueError
    unless 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes is {successes}; expected 0 <= successes <= n = {n}")
    if n == 0:
        return 0.0, 1.0
    share, shrink = successes / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / shrink
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / shrink
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def newcombe(s1: float, n1: int, s2: float, n2: int, z: float = Z_95) -> tuple[float, float]:
    """Interval of the difference `s1/n1 - s2/n2` of independent proportions; (-1, 1) when either n is 0.

    Newcombe (1998), Statistics in Medicine 17:873, method 10. Raises ValueError as `wilson` does.
    """
    (low1, high1), (low2, high2) = wilson(s1, n1, z), wilson(s2, n2, z)
    if n1 == 0 or n2 == 0:
        return -1.0, 1.0
    p1, p2 = s1 / n1, s2 / n2
    return (
        p1 - p2 - math.hypot(p1 - low1, high2 - p2),
        p1 - p2 + math.hypot(high1 - p1, p2 - low2),
    )
