"""ELBO-based Sequence-level Policy Optimization (ESPO, arXiv 2512.03759).

    E = mean over pairs of [ (L + 1)/l sum_{d in S} log p(o_d) + (L + 1)/(L - l) sum_{d not in S} log p(o_d) ] / 2
    rho = exp((E_theta - E_old) / L),    A = r - mean of the others
    loss = - mean_{P,N} min(rho A, clip(rho, 1 - epsilon, 1 + epsilon) A) + beta mean_{P,N} (E_theta - E_ref)^2 / (2 L)

S is a uniform subset of l positions with l uniform on 0..L, log p(o_d) is given o with d's part of the pair masked, and
empty sums are 0: E is exactly unbiased for the ELBO. l is stratified over the group's N completions. E of theta, of the rollout
policy and of the reference are on the same masks. The noise that is left biases rho by a share of
Var(E_theta - E_old) / (2 L^2) and the KL term by Var(E_theta - E_ref) / (2 L).

The published code counts the tokens after the end of the sequence too, and attends to pads in the ELBO though not in
decoding. Here L is each completion's number of live tokens; `train_after_eos = true` counts all.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.masking import Masks, coefficients, draw_counted, row_keys
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.objectives import checks
from dmpo_jax.objectives import policy_gradient as pg
from dmpo_jax.objectives.importance import scored_live
from dmpo_jax.objectives.objective import Context, Prepared, Rollout
from dmpo_jax.objectives.sequence import elbo_changes, live_length, penalised
from dmpo_jax.parallel.mesh import by_row, per_shard

ROLLOUT = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the `espo` objective."""

    name: str = "espo"
    masks: int = 4  # mask replicates per completion and update: two forwards a pair
    epsilon: float = 0.2  # of the clip; 0: no gradient once a ratio has moved in favour of its advantage
    beta: float = 1e-3  # strength of the KL term to the reference; 0: no reference is evaluated
    updates: int = 8  # gradient updates per rollout batch
    train_after_eos: bool = False
    reference_sync: int = 0  # every so many cycles the reference becomes the policy; 0: never

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range or without effect."""
        checks.compared_group(self, group_size)
        checks.clip_and_kl(self, zero_epsilon=True)
        checks.masks("masks", self.masks, "exact")


def stratified_masks(key: jax.Array, rows: jax.Array, live: jax.Array, group_size: int, replicates: int) -> Masks:
    """Antithetic pairs of an explicit number l of masked positions, for global rows `int32[B]` and live `bool[B, L]`.

    l is uniform on 0..live count for every row; within a group of consecutive rows it takes evenly spaced values.
    """
    half = replicates // 2
    level_key, position_key = jax.random.split(key)
    start = jax.vmap(lambda key: jax.random.uniform(key, (half,)))(row_keys(level_key, rows // group_size))
    share = (start + (rows % group_size)[:, None] / group_size) % 1.0
    length = jnp.sum(live, axis=-1, keepdims=True)
    count = jnp.minimum(jnp.floor(share * (length + 1)).astype(jnp.int32), length)
    first = draw_counted(row_keys(position_key, rows), count, live)
    masked = jnp.concatenate([first, ~first & live[:, None]], axis=1)
    return Masks(masked, coefficients(masked, live, "exact"))


def prepare(
    params: dict, reference: dict, rollout: Rollout, key: jax.Array, config: Config, context: Context
) -> Prepared:
    """Leave-one-out advantages `f32[P, N]`, and the policies that the updates compare with."""
    return pg.prepare_advantages(params, reference, rollout, "leave_one_out", config.beta)


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update on fresh masks."""
    live, size = scored_live(rollout, config), rollout.row.shape[1]
    masks = per_shard(
        lambda key, rows: stratified_masks(key, rows[0], rows[1], size, config.masks),
        key,
        (by_row(rollout.row), by_row(live)),
    )
    return loss_on(params, rollout, prepared, masks, config, context)


def loss_on(
    params: dict, rollout: Rollout, prepared: Prepared, masks: Masks, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update for given masks of all P * N rows."""
    length = live_length(rollout, config)
    change, drift = elbo_changes(params, rollout, prepared, masks, config, context)
    log_ratio = change / length
    surrogate = pg.clipped_surrogate(log_ratio, prepared.groups["advantage"], config.epsilon, config.epsilon)
    return penalised(surrogate, log_ratio, pg.kl_k2(drift) / length, rollout, config.beta)
