"""Sandwiched Policy Gradient (arXiv 2510.09541): a lower bound of the likelihood is raised, an upper bound lowered.

From V partly hidden views of a completion, with k_vd whether view v hides live token d and t_v the share it hides:

    lower = mean_v [ sum_d k_vd log p_vd / sum_d k_vd ]
    upper = (1 / beta) mean_d log( mean_v p_vd^beta k_vd / t_v )          over the tokens that some view hides
    s_n   = lower where A_n > 0, else mix x upper + (1 - mix) x lower
    loss  = -sum_n A_n s_n length_n / sum_n length_n,                     A_n = r_n - mean of the group

Views (block_random) look like the states of a sampler that decodes block after block: of the blocks with live tokens
one is drawn, blocks after it are hidden, inside it U{1..n} of its n live tokens; tokens before it and the prompt's are
hidden with probability `prompt_mask`. What follows the first end-of-sequence token is always hidden and never scored. Every
hidden live token is scored: in the paper's figure only the drawn block is, in its code all are, and so here.

Bounds per token, and only in part. With one block, no prompt_mask and every token live, the mean of `lower` is the ELBO
divided by the length, and `upper` from infinitely many views is not below `lower`. With several blocks, tokens do not weigh
alike and neither is a bound. From few views the logarithm of a mean makes `upper` too small on average.

Unlike the published code: advantages are of the whole group and lengths of the whole batch, where there the sum of lengths
is one device's; `upper` is computed from log-probabilities, where there a token whose p^beta underflows drops out as
if no view had hidden it; every live block is drawn equally often, where there the first ones come up more often when the
number of blocks is not a multiple of the live ones.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import checks
from dmpo_jax.objectives import policy_gradient as pg
from dmpo_jax.objectives.mean_field import (
    masked_prompts,
    view_log_probs,
    view_states,
)
from dmpo_jax.objectives.objective import Context, Prepared, Rollout
from dmpo_jax.parallel.mesh import by_group, by_row, per_shard

ROLLOUT = True
NEVER = -1e9  # nats of a token that no view hides; finite, so that its gradient is 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the `spg` objective."""

    name: str = "spg"
    advantage: str = "mean"  # reward less the group's: mean | leave_one_out | z_score
    beta: float = 1.5  # order of the upper bound, 1 or more; 1.0 for Sudoku
    mix: float = 0.5  # share of the upper bound for completions worse than their group; 0: the lower bound alone
    masks: int = 2  # views per completion and update (V)
    block_length: int = 0  # tokens of the blocks that masks follow; 0: the sampler's
    prompt_mask: float = 0.15  # probability that a prompt token, or one before the drawn block, is hidden
    updates: int = 4  # gradient updates per rollout batch (mu)

    reference_sync: ClassVar[int] = 0  # there is no reference

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range."""
        checks.compared_group(self, group_size)
        checks.one_of("advantage", self.advantage, pg.ADVANTAGES)
        checks.prompt_mask(self)
        if not 1 <= self.beta <= 100:
            raise UserError(f"objective.beta = {self.beta}: expected 1 to 100; below 1 there is no upper bound")
        if not 0 <= self.mix <= 1:
            raise UserError(f"objective.mix = {self.mix}: expected 0 (lower bound alone) to 1 (upper bound alone)")
        if not 1 <= self.masks <= 1000:
            raise UserError(f"objective.masks = {self.masks}: expected 1 to 1000")
        if self.block_length < 0:
            raise UserError(f"objective.block_length = {self.block_length}: expected 0 (the sampler's) or more")


def block_masks(keys: jax.Array, live: jax.Array, views: int, block: int, rate: float) -> jax.Array:
    """What `views` views hide, `bool[B, V, L]`, for `live bool[B, L]`, blocks of `block` tokens and rows' own keys.

    The views of a row draw different blocks as long as there are enough.
    """
    length = live.shape[-1]
    block_of = jnp.arange(length) // block
    members = block_of == jnp.arange(-(-length // block))[:, None]  # [blocks, L]

    def row(key, live):
        block_key, count_key, position_key = jax.random.split(key, 3)
        live_of = jnp.sum(members & live, axis=-1)
        order = jnp.argsort(jnp.where(live_of > 0, jax.random.uniform(block_key, live_of.shape), jnp.inf))
        drawn = order[jnp.arange(views) % jnp.maximum(jnp.sum(live_of > 0), 1)]
        most = live_of[drawn]
        count = jnp.minimum(1 + (jax.random.uniform(count_key, (views,)) * most).astype(jnp.int32), most)
        position = jax.random.uniform(position_key, (views, length))
        inside = (block_of == drawn[:, None]) & live
        rank = jnp.argsort(jnp.argsort(jnp.where(inside, position, jnp.inf), axis=-1), axis=-1)
        before, after = block_of < drawn[:, None], block_of > drawn[:, None]
        return (inside & (rank < count[:, None])) | (before & (position < rate)) | after | ~live

    return jax.vmap(row)(keys, live)


def bounds(log_prob: jax.Array, scored: jax.Array, live: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    """(lower, upper) `f32[P, N]` in nats per token, from `log_prob` and `scored`, both `[P, N, V, L]`, and `live [P, N, L]`.

    `scored` is live and hidden. A view that hides nothing adds 0 to the lower bound.
    """
    count = jnp.sum(scored, axis=-1).astype(jnp.float32)
    lower = jnp.mean(jnp.sum(jnp.where(scored, log_prob, 0.0), axis=-1) / jnp.maximum(count, 1.0), axis=-1)

    share = jnp.maximum(count, 1.0) / jnp.maximum(jnp.sum(live, axis=-1), 1).astype(jnp.float32)[..., None]
    terms = jnp.where(scored, beta * log_prob - jnp.log(share)[..., None], NEVER)
    power = jax.nn.logsumexp(terms, axis=2) - jnp.log(jnp.float32(scored.shape[2]))
    hidden_once = jnp.any(scored, axis=2)
    tokens = jnp.maximum(jnp.sum(hidden_once, axis=-1), 1).astype(jnp.float32)
    upper = jnp.sum(jnp.where(hidden_once, power, 0.0), axis=-1) / (beta * tokens)
    return lower, upper


def prepare(
    params: dict, reference: dict, rollout: Rollout, key: jax.Array, config: Config, context: Context
) -> Prepared:
    """Advantages and the batch's mean length, `f32[P, N]`."""
    groups = {
        "advantage": pg.advantages(rollout.reward, config.advantage),
        "mean_length": pg.mean_length(rollout.live),
    }
    return Prepared(groups=groups, whole=(), metrics=pg.rollout_metrics(rollout))


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update on fresh views."""
    length = rollout.completion.shape[-1]
    block = config.block_length or context.sampler.block_length or length
    view_key, prompt_key = jax.random.split(key)
    hidden = per_shard(
        lambda key, rows: block_masks(row_keys(key, rows[0]), rows[1], config.masks, block, config.prompt_mask),
        view_key,
        (by_row(rollout.row), by_row(rollout.live)),
    )
    prompts = masked_prompts(rollout, prompt_key, config.prompt_mask, context.mask_id, config.masks)
    return loss_on(params, rollout, prepared, hidden, prompts, config, context)


def loss_on(
    params: dict,
    rollout: Rollout,
    prepared: Prepared,
    hidden: jax.Array,
    prompts: Prompts,
    config: Config,
    context: Context,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update for given views: what they hide `bool[P * N, V, L]`, and a partly hidden prompt for each."""
    log_prob = view_log_probs(params, rollout, view_states(params, rollout, prompts, hidden, context), context)
    scored = by_group(hidden, len(rollout.completion)) & rollout.live[:, :, None]
    lower, upper = bounds(log_prob, scored, rollout.live, config.beta)

    advantage = prepared.groups["advantage"]
    value = jnp.where(advantage > 0, lower, config.mix * upper + (1.0 - config.mix) * lower)
    weight = jnp.sum(rollout.live, axis=-1).astype(jnp.float32) / prepared.groups["mean_length"]
    metrics = {"bound/lower": jnp.mean(lower), "bound/upper": jnp.mean(upper)}
    return -jnp.mean(advantage * value * weight), jax.lax.stop_gradient(metrics)
