"""Coupled-GRPO of DiffuCoder (arXiv 2506.20639): diffu-GRPO's loss on log-probabilities from complementary masks.

Three views give every token a log-probability: one with the whole completion hidden, one with a random part M hidden at
rate rho ~ U(0.2, 0.8), and one with the rest of it hidden, so that each token is scored once by the pair:

    l_d  = ( log p(o_d | all hidden) + log p(o_d | M hidden) / rho )            / 2    for d in M
           ( log p(o_d | all hidden) + log p(o_d | the rest hidden) / (1 - rho) ) / 2    otherwise
    loss = mean over live tokens of -min(exp(l_d - l_d_old) A_n, clip(exp(l_d - l_d_old), 1 - eps, 1 + eps) A_n) + beta k3

with the leave-one-out advantage A_n = r_n - mean of the others, and masks shared by policy, rollout policy and reference.

Biased: over masks, l_d has mean (f(1) + f(rho) + f(1 - rho)) / 2, where f(t) is the token's mean log-probability when it is
hidden and the other tokens are at rate t. That is one and a half log-probabilities, the fully hidden one at half weight,
and its exponentiated difference is not a ratio of probabilities.

Unlike the published code: rho is drawn for every row and not once for a batch, which would make rows depend on how they are
batched; the pair's masks lie within the live tokens, and what follows them is hidden in all three views; the two
masks are exact complements, where a draw equal to rho there is in neither; the sum is divided by the tokens of the
whole batch instead of one device's. The reference becomes the policy at a sync, where there it moves 60 % of the way.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import repeat
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import checks
from dmpo_jax.objectives import policy_gradient as pg
from dmpo_jax.objectives.diffu_grpo import clipped_loss, prepare
from dmpo_jax.objectives.mean_field import view_log_probs, view_states
from dmpo_jax.objectives.objective import Context, Prepared, Rollout
from dmpo_jax.parallel.mesh import by_group, by_row, per_shard

ROLLOUT = True
__all__ = ["ROLLOUT", "Config", "loss", "prepare"]  # diffu-GRPO prepares the same


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the `coupled_grpo` objective."""

    name: str = "coupled_grpo"
    advantage: str = "leave_one_out"  # reward less the group's: mean | leave_one_out | z_score
    epsilon: float = 0.5  # clip range of the ratio on either side of 1
    beta: float = 0.01  # strength of the KL to the reference; 0: none, and no reference forward
    lowest_rate: float = 0.2  # the pair's mask rate rho is uniform from here ...
    highest_rate: float = 0.8  # ... to here
    updates: int = 2  # gradient updates per rollout batch (mu)
    reference_sync: int = 32  # every so many cycles (64 updates) the reference becomes the policy; 0: never

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range."""
        checks.compared_group(self, group_size)
        checks.one_of("advantage", self.advantage, pg.ADVANTAGES)
        checks.clip_and_kl(self)
        if not 0 < self.lowest_rate <= self.highest_rate < 1:
            raise UserError(
                f"objective.lowest_rate, highest_rate = {self.lowest_rate}, {self.highest_rate}: expected "
                "0 < lowest_rate <= highest_rate < 1"
            )


def coupled_masks(keys: jax.Array, live: jax.Array, low: float, high: float) -> tuple[jax.Array, jax.Array]:
    """A pair of complementary masks over `live bool[B, L]` and each row's rate: `bool[B, 2, L]`, `f32[B]`."""

    def row(key, live):
        rate_key, position_key = jax.random.split(key)
        rate = low + (high - low) * jax.random.uniform(rate_key)
        first = jax.random.uniform(position_key, live.shape) < rate
        return jnp.stack([first & live, ~first & live]), rate

    return jax.vmap(row)(keys, live)


def coupled_log_probs(
    params: dict, rollout: Rollout, masked: jax.Array, rate: jax.Array, context: Context
) -> jax.Array:
    """l_d as in the module's equation, `f32[P, N, L]`, for masks `bool[P * N, 2, L]` at rates `f32[P * N]`."""
    groups, size, _ = rollout.completion.shape
    live = by_row(rollout.live)[:, None]
    hidden = jnp.concatenate([jnp.ones_like(live), masked | ~live], axis=1)
    states = view_states(params, rollout, repeat(rollout.prompts, 3 * size), hidden, context)
    first = masked[:, 0]
    pair = jnp.where(first[..., None], states[:, 1], states[:, 2])
    log_prob = view_log_probs(params, rollout, jnp.stack([states[:, 0], pair], axis=1), context)
    weight = by_group(1.0 / jnp.where(first, rate[:, None], 1.0 - rate[:, None]), groups)
    return 0.5 * (log_prob[:, :, 0] + weight * log_prob[:, :, 1])


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update on fresh masks."""
    masked, rate = per_shard(
        lambda key, rows: coupled_masks(row_keys(key, rows[0]), rows[1], config.lowest_rate, config.highest_rate),
        key,
        (by_row(rollout.row), by_row(rollout.live)),
    )
    return loss_on(params, rollout, prepared, masked, rate, config, context)


def loss_on(
    params: dict,
    rollout: Rollout,
    prepared: Prepared,
    masked: jax.Array,
    rate: jax.Array,
    config: Config,
    context: Context,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update for given masks and rates of all P * N rows, as `coupled_masks` draws them."""
    score = lambda tree: coupled_log_probs(tree, rollout, masked, rate, context)  # noqa: E731
    return clipped_loss(score, params, rollout, prepared, config)
