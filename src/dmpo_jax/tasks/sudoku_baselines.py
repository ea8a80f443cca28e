"""What trivial policies score on given sudoku items, computed exactly."""

import numpy as np

from dmpo_jax.tasks.sudoku_grids import BOX, COLUMN, ROW, completions, grids


def baselines(puzzles: np.ndarray, solutions: np.ndarray) -> dict[str, float]:
    """Expected scores against the stored solutions: puzzles, solutions int[N, 16] -> figures from 0 to 1.

    Cell accuracies, pooled over all blanks: `uniform_digit` (a random digit in each blank), `constant_digit`
    (the best single digit), `one_look` (a random digit among those that row, column and box of the givens
    leave), `valid_grid_cells` (a random grid that keeps the givens: the ceiling that ambiguous puzzles set).
    Exact solves: `valid_grid_stored` (the same random grid is the stored one). `ambiguous` is the share of
    items with more than one solution.
    """
    empty = puzzles == 0
    blanks = empty.sum()
    fits = completions(puzzles)
    count = fits.sum(axis=1)
    # votes[n, c, d]: how many completions of item n have digit d+1 in cell c
    votes = np.einsum("ng,gcd->ncd", fits.astype(float), grids()[:, :, None] == np.arange(1, 5))
    stored = np.take_along_axis(votes, solutions[:, :, None] - 1, axis=2)[:, :, 0]
    legal = _legal(puzzles).sum(axis=2)
    return {
        "baseline/uniform_digit": 0.25,
        "baseline/constant_digit": max(
            float(solutions[empty].tolist().count(d) / blanks) for d in (1, 2, 3, 4)
        ),
        "baseline/one_look": float((1 / legal[empty]).sum() / blanks),
        "baseline/valid_grid_cells": float((stored / count[:, None])[empty].sum() / blanks),
        "baseline/valid_grid_stored": float(np.mean(1 / count)),
        "ambiguous": float(np.mean(count > 1)),
    }


def _legal(puzzles: np.ndarray) -> np.ndarray:
    """Whether each digit is absent from the givens of the cell's row, column and box: bool[N, 16, 4]."""
    peers = (ROW[:, None] == ROW) | (COLUMN[:, None] == COLUMN) | (BOX[:, None] == BOX)
    holds = puzzles[:, :, None] == np.arange(1, 5)
    return ~np.einsum("cp,npd->ncd", peers, holds)
