"""What trivial policies score on given sudoku items, computed exactly."""

import numpy as np

from dmpo_jax.tasks.sudoku_grids import BOX, COLUMN, ROW, completions, grids


def baselines(puzzles: np.ndarray, solutions: np.ndarray) -> dict[str, dict[str, float]]:
    """Expected scores of policies that know little: puzzles, solutions int[N, 16] -> figures from 0 to 1 by policy.

    `accuracy` is cell accuracy against the stored solutions, pooled over all blanks: of a uniformly random digit in each
    blank, of the best constant digit, of one look (a random digit among those that row, column and box of the
    givens leave), and of a random valid grid that keeps the givens, the ceiling that ambiguous puzzles set; the `exact` of
    the last is how often that grid is the stored one.
    """
    empty = puzzles == 0
    blanks = empty.sum()
    fits = completions(puzzles)
    count = fits.sum(axis=1)
    # votes[n, c, d]: how many completions of item n have digit d+1 in cell c
    votes = np.einsum("ng,gcd->ncd", fits.astype(float), grids()[:, :, None] == np.arange(1, 5))
    stored = np.take_along_axis(votes, solutions[:, :, None] - 1, axis=2)[:, :, 0]
    legal = _legal(puzzles).sum(axis=2)
    constant = max(solutions[empty].tolist().count(digit) for digit in (1, 2, 3, 4)) / blanks
    valid = float((stored / count[:, None])[empty].sum() / blanks)
    return {
        "uniform digit": {"accuracy": 0.25},
        "constant digit": {"accuracy": float(constant)},
        "one look": {"accuracy": float((1 / legal[empty]).sum() / blanks)},
        "random valid grid": {"accuracy": valid, "exact": float(np.mean(1 / count))},
    }


def ambiguous(puzzles: np.ndarray) -> float:
    """Share of puzzles int[N, 16] with more than one solution."""
    return float(np.mean(completions(puzzles).sum(axis=1) > 1))


def _legal(puzzles: np.ndarray) -> np.ndarray:
    """Whether each digit is absent from the givens of the cell's row, column and box: bool[N, 16, 4]."""
    peers = (ROW[:, None] == ROW) | (COLUMN[:, None] == COLUMN) | (BOX[:, None] == BOX)
    holds = puzzles[:, :, None] == np.arange(1, 5)
    return ~np.einsum("cp,npd->ncd", peers, holds)
