"""Weighted direct discriminative optimisation (WDDO) of DMPO (arXiv 2510.08233, section 3; DDO is arXiv 2503.01103).

Instead of DMPO's weighted cross-entropy, the policy is told apart from the one that rolled out. With w of mean 1 over a group
(`importance.py`) and D = ELBO_theta - ELBO_p, the log-ratio of the policy now and at the rollout,

    loss = - mean_o [ w log sigmoid(beta D_1) + alpha_ddo log sigmoid(-beta D_2) ],

whose only minimiser at beta = alpha_ddo = 1 is p_theta = w p = p*. The negative term is part of it, so there is no baseline.

D_1 and D_2 are estimated on two groups of antithetic pairs that are independent of each other. Each D takes both ELBOs on the
same masks, the rollout policy's being evaluated anew at every update: at theta = p it is exactly 0, where a stored ELBO of
other masks would leave several nats of noise inside the sigmoid. What noise is left biases the loss upwards, as log sigmoid
is concave (Jensen): E[log sigmoid(beta D)] <= log sigmoid(beta E[D]), to second order by beta^2 Var(D) s (1 - s) / 2 with
s = sigmoid(beta E[D]). The groups' independence does not change that mean, only how the two terms' noise adds up.

With `arithmetic = "published"` the official code is reproduced: its two groups are the masks and their complements, hence not
independent; `independent = false` sums over replicates instead of averaging; ELBO_p is the stored one of the weights' masks;
and the weights sum to 1, so that the positive term is N times too weak and p* is not the minimiser.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.masking import Masks
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import group
from dmpo_jax.objectives.importance import WeightConfig, scored_live, weights_on
from dmpo_jax.objectives.objective import Context, Prepared, Rollout, elbo_replicates_on, rollout_masks

ROLLOUT = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(WeightConfig):
    """Settings of the `wddo` objective."""

    name: str = "wddo"
    beta: float = 1.0  # scales the log-ratio inside the sigmoids, per nat
    alpha_ddo: float = 1.0  # strength of the negative term
    independent: bool = True  # D_1 and D_2 on masks of their own; false: one estimate of all masks for both

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range, without effect, or against the arithmetic."""
        super().validate(group_size, sampler)
        for key in ("beta", "alpha_ddo"):
            if not getattr(self, key) > 0:
                raise UserError(f"objective.{key} = {getattr(self, key)}: expected a positive number")
        if self.independent and not self.published and self.masks % 4:
            raise UserError(
                f"objective.masks = {self.masks}: two independent groups of antithetic pairs take a multiple of 4; "
                "or set objective.independent = false"
            )


def prepare(
    params: dict, reference: dict, rollout: Rollout, key: jax.Array, config: Config, context: Context
) -> Prepared:
    """Weights of a rollout batch on fresh masks."""
    masks = rollout_masks(rollout, scored_live(rollout, config), key, config.weight_masks, config.mask_law)
    return prepare_on(params, reference, rollout, masks, config, context)


def prepare_on(
    params: dict, reference: dict, rollout: Rollout, masks: Masks, config: Config, context: Context
) -> Prepared:
    """Weights `f32[P, N]` of a rollout batch, with both likelihoods estimated on the given masks of all P * N rows."""
    rows, metrics = weights_on(params, reference, rollout, masks, config, context)
    return Prepared(groups=rows, whole=() if config.published else params, metrics=metrics)


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update on fresh masks."""
    masks = rollout_masks(rollout, scored_live(rollout, config), key, config.masks, config.mask_law)
    return loss_on(params, rollout, prepared, masks, config, context)


def loss_on(
    params: dict, rollout: Rollout, prepared: Prepared, masks: Masks, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update for given masks of all P * N rows; their first pairs serve D_1, the others D_2."""
    live, groups = scored_live(rollout, config), prepared.groups
    split = lambda params: estimates(elbo_replicates_on(params, rollout, live, masks, context), config)  # noqa: E731
    real, fake = split(params)
    if config.published:
        before = (groups["log_prob"],) * 2
    else:
        before = split(jax.lax.stop_gradient(prepared.whole))
    real, fake = real - before[0], fake - before[1]
    uniform = group.group_baseline(groups["log_mass"])
    weight = groups["weight"] * uniform if config.published else groups["weight"]
    value = discriminative_loss(weight, uniform, real, fake, groups["keep"], config.beta, config.alpha_ddo)
    moved = jax.lax.stop_gradient(0.5 * (real + fake))
    return value, {"policy_log_ratio/mean": jnp.mean(moved), "policy_log_ratio/std": jnp.std(moved)}


def estimates(replicates: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Two ELBOs `f32[P, N]` from the estimates `f32[P, N, R]` of antithetic masks."""
    half = replicates.shape[-1] // 2
    if not config.independent:
        whole = jnp.sum(replicates, axis=-1) if config.published else jnp.mean(replicates, axis=-1)
        return whole, whole
    first, complements = replicates[..., :half], replicates[..., half:]
    if not config.published:
        pairs = 0.5 * (first + complements)
        first, complements = pairs[..., : half // 2], pairs[..., half // 2 :]
    return jnp.mean(first, axis=-1), jnp.mean(complements, axis=-1)


def discriminative_loss(
    weight: jax.Array,
    uniform: jax.Array,
    real: jax.Array,
    fake: jax.Array,
    keep: jax.Array,
    beta: float = 1.0,
    alpha_ddo: float = 1.0,
) -> jax.Array:
    """- mean_P sum_N [ weight log sigmoid(beta real) + alpha_ddo uniform log sigmoid(-beta fake) ], the module's equation.

    weight and uniform `f32[P, N]` sum to 1 over the group (w / N and 1 / N), real and fake `f32[P, N]` are log-ratios in nats;
    rows of no weight and groups `keep bool[P, 1]` leaves out do not count.
    """
    positive = jnp.where(weight > 0, weight * jax.nn.log_sigmoid(beta * real), 0.0)
    negative = jnp.where(uniform > 0, uniform * jax.nn.log_sigmoid(-beta * fake), 0.0)
    return -jnp.mean(jnp.sum(jnp.where(keep, positive + alpha_ddo * negative, 0.0), axis=1))
