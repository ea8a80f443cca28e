"""Fixed membership of generated data in splits, whatever the seed: no item is ever in two."""

import numpy as np


def mix(keys: np.ndarray) -> np.ndarray:
    """Scramble uint64 keys one to one (the finaliser of SplitMix64; Steele, Lea and Flood 2014)."""
    keys = keys.astype(np.uint64)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
