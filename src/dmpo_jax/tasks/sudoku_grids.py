"""The 288 complete 4x4 grids, which puzzles they solve, and puzzles drawn with one solution each.

A grid or puzzle is int32[16], row by row, digits 1 to 4 and 0 for a blank.
"""

import functools
import itertools

import numpy as np

from dmpo_jax.tasks.splits import mix

ROW = np.arange(16) // 4
COLUMN = np.arange(16) % 4
BOX = ROW // 2 * 2 + COLUMN // 2

# Share of puzzles by number of blanks in the published training file (estimated from a sample of 256 of it).
BLANK_COUNTS = np.array([7, 8, 9, 11, 12])
BLANK_SHARES = np.array([0.32, 0.32, 0.30, 0.05, 0.01])

GRIDS_IN_SPLIT = {"train": 200, "validation": 44, "test": 44}
_BATCH = 4096


@functools.cache
def grids() -> np.ndarray:
    """All 288 complete grids in ascending order, int32[288, 16]; read-only."""
    rows = np.array(list(itertools.permutations((1, 2, 3, 4))), dtype=np.int32)
    pairs = np.array([(a, b) for a in rows for b in rows if not (a == b).any() and len({*a[:2], *b[:2]}) == 4])
    pairs = pairs.reshape(-1, 8)
    whole = np.concatenate([np.repeat(pairs, len(pairs), axis=0), np.tile(pairs, (len(pairs), 1))], axis=1).reshape(
        -1, 4, 4
    )
    fits = (np.sort(whole, axis=1) == np.arange(1, 5)[:, None]).all(axis=(1, 2))
    result = np.ascontiguousarray(whole[fits].reshape(-1, 16))
    result.flags.writeable = False
    return result


@functools.cache
def _agreement() -> np.ndarray:
    """Bit c of entry [g, h] says whether grids g and h agree in cell c; uint16[288, 288]."""
    same = grids()[:, None] == grids()[None]
    return (same << np.arange(16)).sum(axis=-1).astype(np.uint16)


def is_grid(cells: np.ndarray) -> np.ndarray:
    """Whether each of [..., 16] obeys the rules: every row, column and box holds 1, 2, 3 and 4."""
    lines = [
        np.sort(cells[..., np.argsort(unit, kind="stable")].reshape(*cells.shape[:-1], 4, 4))
        for unit in (ROW, COLUMN, BOX)
    ]
    return np.logical_and.reduce([(line == np.arange(1, 5)).all(axis=(-1, -2)) for line in lines])


def completions(puzzles: np.ndarray) -> np.ndarray:
    """Which of the 288 grids keep the givens of each puzzle: int[N, 16] -> bool[N, 288]."""
    fits = np.ones((len(puzzles), len(grids())), bool)
    for cell in range(16):
        given = puzzles[:, cell, None]
        fits &= (given == 0) | (given == grids()[:, cell])
    return fits


def is_unique(grid: np.ndarray, clues: np.ndarray) -> np.ndarray:
    """Whether grid number int[N] is the only one with its digits in the cells of bit mask uint16[N]."""
    return ((clues[:, None] & ~_agreement()[grid]) == 0).sum(axis=1) == 1


def split_grids(split: str) -> np.ndarray:
    """The grid numbers of a split: 200 for training, 44 each for validation and test."""
    order = np.argsort(mix(np.arange(1, len(grids()) + 1)), kind="stable")
    start = 0
    for name, count in GRIDS_IN_SPLIT.items():
        if name == split:
            return order[start : start + count]
        start += count
    raise KeyError(split)


def draw_puzzles(split: str, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw distinct puzzles with one solution each: (puzzles, solutions), both int32[count, 16].

    Grid uniform among those of the split, number of blanks by `BLANK_SHARES`, clues uniform among the sets of
    that size that leave one solution.
    """
    pool = split_grids(split)
    seen: set[bytes] = set()
    chosen: list[np.ndarray] = []
    while True:
        grid = rng.choice(pool, _BATCH)
        blanks = rng.choice(BLANK_COUNTS, _BATCH, p=BLANK_SHARES)
        clues = np.zeros((_BATCH, 16), bool)
        pending = np.arange(_BATCH)
        while len(pending):
            rank = np.argsort(rng.random((len(pending), 16)), axis=1)
            clues[pending] = rank >= blanks[pending, None]
            mask = (clues[pending] << np.arange(16)).sum(axis=1).astype(np.uint16)
            pending = pending[~is_unique(grid[pending], mask)]
        solutions = grids()[grid]
        for puzzle, solution in zip((solutions * clues).astype(np.int32), solutions, strict=True):
            key = puzzle.tobytes()
            if key not in seen:
                seen.add(key)
                chosen.append(np.stack([puzzle, solution]))
                if len(chosen) == count:
                    both = np.stack(chosen)
                    return both[:, 0], both[:, 1]


def careless_fill(puzzle: np.ndarray) -> np.ndarray:
    """Fill each row's blanks with its missing digits in ascending order, ignoring columns and boxes."""
    filled = puzzle.copy().reshape(4, 4)
    for row in filled:
        row[row == 0] = [digit for digit in (1, 2, 3, 4) if digit not in row]
    return filled.reshape(16)
