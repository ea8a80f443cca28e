"""What every training method is given and what it gives back.

A method is a module with `Config` (a frozen dataclass of its settings, with `validate(group, sampler)`), `ROLLOUT`
(whether it learns from the policy's own completions or from demonstrations) and two pure functions:

    prepare(params, reference, rollout, key, config, context) -> Prepared      once per cycle
    loss(params, rollout, prepared, key, config, context) -> (loss, metrics)   at every update

Methods on ELBOs (dmpo, wddo, gdpo, espo) also have `loss_on(params, rollout, prepared, masks, config, context)`, the same for
given masks of all P * N rows; those whose weights need masks (dmpo, wddo) have `prepare_on` likewise.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Prompts, repeat
from dmpo_jax.diffusion.elbo import elbo, elbo_replicates
from dmpo_jax.diffusion.masking import Masks, draw_masks, row_keys
from dmpo_jax.diffusion.sampler import SamplerConfig
from dmpo_jax.model.parameters import ModelConfig
from dmpo_jax.parallel.mesh import by_group, by_row, per_shard


class Rollout(NamedTuple):
    """P prompts with N completions each of L tokens; every leaf leads with P, so it can be split by whole groups.

    prompts: tokens `int32[P, T]`, length `int32[P]`; row `int32[P, N]`, the global row numbers that key randomness;
    completion and step `int32[P, N, L]` (step: when each token was committed, -1 for filler); log_prob, sampled_log_prob
    and entropy `f32[P, N, L]` at that step, as in `diffusion.sampler.Trace` (entropy is None unless it was traced);
    live `bool[P, N, L]`, the tokens that count; reward `f32[P, N]`.
    """

    prompts: Prompts
    row: jax.Array
    completion: jax.Array
    step: jax.Array
    log_prob: jax.Array
    sampled_log_prob: jax.Array
    entropy: jax.Array | None
    live: jax.Array
    reward: jax.Array


class Prepared(NamedTuple):
    """What `prepare` computed for the cycle's updates: `groups` leads with P, `whole` belongs to all of them."""

    groups: Any
    whole: Any
    metrics: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The static surroundings of a method: the model, its special tokens and how rollouts were drawn.

    reference_model is the shape of `reference`, which differs from the policy's where another model teaches.
    """

    model: ModelConfig
    reference_model: ModelConfig
    mask_id: int
    eos_id: int
    sampler: SamplerConfig
    loss_chunk: int = 32  # completion positions whose logits are alive together


def given_rollout(prompts: Prompts, completion: jax.Array, live: jax.Array, reward: jax.Array) -> Rollout:
    """A rollout of given completions `int32[P, N, L]` with rewards `f32[P, N]`, without the trace of a decoding."""
    groups, size, _ = completion.shape
    nothing = jnp.zeros(completion.shape, jnp.float32)
    return Rollout(
        prompts=prompts,
        row=jnp.arange(groups * size, dtype=jnp.int32).reshape(groups, size),
        completion=completion,
        step=nothing.astype(jnp.int32),
        log_prob=nothing,
        sampled_log_prob=nothing,
        entropy=None,
        live=live,
        reward=reward,
    )


def rollout_masks(rollout: Rollout, live: jax.Array, key: jax.Array, replicates: int, law: str) -> Masks:
    """Antithetic masks of all P * N completions over their live tokens `bool[P, N, L]`, keyed by (key, global row)."""
    return per_shard(
        lambda key, rows: draw_masks(row_keys(key, rows[0]), rows[1], replicates, law),
        key,
        (by_row(rollout.row), by_row(live)),
    )


def _of_rollout(estimate, params: dict, rollout: Rollout, live: jax.Array, masks: Masks, context: Context) -> jax.Array:
    groups, size, _ = rollout.completion.shape
    value = estimate(
        params,
        repeat(rollout.prompts, size),
        by_row(rollout.completion),
        masks,
        by_row(live),
        mask_id=context.mask_id,
        config=context.model,
        chunk=context.loss_chunk,
    )
    return by_group(value, groups)


def elbo_on(params: dict, rollout: Rollout, live: jax.Array, masks: Masks, context: Context) -> jax.Array:
    """ELBO `f32[P, N]` of every completion under `params` for given masks of all P * N rows."""
    return _of_rollout(elbo, params, rollout, live, masks, context)


def elbo_replicates_on(params: dict, rollout: Rollout, live: jax.Array, masks: Masks, context: Context) -> jax.Array:
    """Every mask's own estimate `f32[P, N, R]`, whose mean over R is `elbo_on`."""
    return _of_rollout(elbo_replicates, params, rollout, live, masks, context)


def rollout_elbo(
    params: dict, rollout: Rollout, live: jax.Array, key: jax.Array, replicates: int, law: str, context: Context
) -> jax.Array:
    """ELBO `f32[P, N]` of every completion under `params`, with masks keyed by (key, global row).

    The same key gives the same masks, so two sets of parameters are compared on equal terms.
    """
    return elbo_on(params, rollout, live, rollout_masks(rollout, live, key, replicates, law), context)


def normalizer(live: jax.Array, kind: str) -> jax.Array:
    """`f32` that divides a completion's loss: `canvas`, the constant L; `live`, each row's own number of live tokens.

    canvas keeps the sequence objective; live gives every completion the same weight whatever its length.
    """
    if kind == "canvas":
        return jnp.float32(live.shape[-1])
    return jnp.maximum(jnp.sum(live, axis=-1), 1).astype(jnp.float32)
