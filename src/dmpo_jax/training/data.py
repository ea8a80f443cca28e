"""Examples as arrays, and batches that are a pure function of (seed, cycle)."""

import sys
from typing import NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.errors import UserError
from dmpo_jax.model.pretrained_tokenizer import PretrainedTokenizer
from dmpo_jax.model.tokenizer import Tokenizer
from dmpo_jax.parallel.distributed import say
from dmpo_jax.parallel.mesh import ROWS
from dmpo_jax.tasks.task import Example
from dmpo_jax.training.setup import Setup


class Batch(NamedTuple):
    """P prompts: tokens `int32[P, T]` with length `int32[P]`, demonstration `int32[P, L]`, and the graders' features."""

    prompts: Prompts
    demonstration: np.ndarray | jax.Array
    features: dict[str, np.ndarray | jax.Array]


def encode(
    examples: list[Example],
    tokenizer: Tokenizer | PretrainedTokenizer,
    length: int,
    buckets: tuple[int, ...] = (),
    truncation: str = "refuse",
    begun: str = "",
) -> Batch:
    """All examples as one host batch. Demonstrations end with eos and are filled up with it to `length` tokens.

    After its prompt each answer is `begun` with that text.

    Raises UserError where a prompt is wider than the widest bucket (unless `truncation` is "left" or "right": then such
    prompts lose tokens on that side, and a line says how many did) or a demonstration leaves no room for eos.
    """
    prompts = [tokenizer.encode_prompt(e.prompt, begun) for e in examples]
    width = max(max(map(len, prompts)), 1)
    if buckets and width > max(buckets):
        widest = max(buckets)
        if truncation == "refuse":
            longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
            raise UserError(
                f"rollout.prompt_buckets: the prompt {examples[longest].prompt[:40]!r} has {width} tokens, but the widest "
                f"bucket is {widest}; add a bucket of {width} or more, or set tokenizer.truncation"
            )
        count = sum(len(ids) > widest for ids in prompts)
        say(f"{count} of {len(prompts)} prompts cut to {widest} tokens on the {truncation}", file=sys.stderr)
        prompts = [ids[-widest:] if truncation == "left" else ids[:widest] for ids in prompts]
    tokens = np.full((len(prompts), max(buckets, default=width)), tokenizer.pad_id, np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    demonstration = np.full((len(prompts), length), tokenizer.eos_id, np.int32)
    for row, example in zip(demonstration, examples, strict=True):
        ids = tokenizer.encode(example.demonstration)
        if len(ids) >= length:
            raise UserError(
                f"rollout.completion_length = {length}: the answer {example.demonstration[:40]!r} has {len(ids)} tokens "
                f"and needs one more for the end of the sequence; set {len(ids) + 1} or more"
            )
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    names = examples[0].features
    features = {name: np.stack([e.features[name] for e in examples]).astype(np.int32) for name in names}
    return Batch(Prompts(tokens, lengths), demonstration, features)


def encoded(examples: list[Example], setup: Setup, begun: str = "") -> Batch:
    """`encode` with a run's settings."""
    rollout, truncation = setup.config.rollout, setup.config.tokenizer.truncation
    return encode(examples, setup.tokenizer, rollout.completion_length, rollout.prompt_buckets, truncation, begun)


def take(data: Batch, index: np.ndarray, buckets: tuple[int, ...] = ()) -> Batch:
    """The rows of `index`, their prompts as narrow as the smallest bucket that holds them."""
    batch = jax.tree.map(lambda x: x[index], data)
    if buckets:
        width = min(b for b in buckets if b >= batch.prompts.length.max())
        batch = batch._replace(prompts=batch.prompts._replace(tokens=batch.prompts.tokens[:, :width]))
    return batch


class Batches:
    """Batch k of a split: the k-th slice of an endless sequence of shuffled passes over the data."""

    def __init__(self, data: Batch, prompts: int, seed: int, buckets: tuple[int, ...] = ()):
        """`data` on the host; `prompts` per batch."""
        self._data, self._prompts, self._buckets = data, prompts, buckets
        self._order = grain.MapDataset.range(len(data.prompts.length)).seed(seed).shuffle().repeat()

    def index(self, k: int) -> np.ndarray:
        """Which examples batch k >= 0 holds, `int[P]`: the same on every call, host and mesh."""
        return np.array([self._order[k * self._prompts + i] for i in range(self._prompts)])

    def __getitem__(self, k: int) -> Batch:
        """Batch number k."""
        return take(self._data, self.index(k), self._buckets)


def place(batch, mesh: jax.sharding.Mesh):
    """Host arrays onto the mesh, split by rows: the one transfer to the devices that a cycle makes."""
    by_rows = NamedSharding(mesh, PartitionSpec(ROWS))
    with jax.transfer_guard("allow"):
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, by_rows, lambda part: x[part]), batch)
