"""wd1, weighted log-likelihood without a ratio (arXiv 2507.08838), on the mean-field likelihood of d1.

The maximiser of E[A] less KLs to the rollout policy is the rollout policy tilted by exp(psi A). Its cross-entropy is
estimated with self-normalised weights, and a second set, of the negated advantage, pushes bad completions down:

    A_n  = r_n - mean of the group
    w+   = softmax_n(psi A),   w- = softmax_n(-psi A)
    loss = -mean_P sum_n (w+_n - w-_n) sum_{live d} log p_theta(o_d | q', completion hidden)

q' hides prompt tokens with probability 0.15, anew at each update. One forward per update; neither the rollout policy
nor a reference is evaluated.

Biased: the mean-field likelihood is not the completion's; and for a reused batch the weights stay those of the rollout
policy. With w- the loss has no minimum (it goes on sharpening); `negative = 0`, the paper's wd1-P, has one but pulls
every completion up. This is DMPO with the individual baseline and without a likelihood ratio in the weights.

Unlike the published code: both softmaxes are over a prompt's group, where there they are over the rows of one device,
which are a group only if each device holds exactly one. The paper's KL to a reference, whose rollouts come from a mixture
of both policies, was off in its experiments and is left out.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import checks, group
from dmpo_jax.objectives import policy_gradient as pg
from dmpo_jax.objectives.mean_field import masked_prompts, mean_field_log_probs
from dmpo_jax.objectives.objective import Context, Prepared, Rollout

ROLLOUT = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the `wd1` objective."""

    name: str = "wd1"
    psi: float = 1.0  # sharpness of the weights, in 1 / reward units
    negative: float = 1.0  # strength of the negative weights; 0: wd1-P, the positive ones alone
    prompt_mask: float = 0.15  # probability that a prompt token is hidden
    updates: int = 8  # gradient updates per rollout batch (mu); 12 for GSM8K and MATH

    reference_sync: ClassVar[int] = 0  # there is no reference

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range."""
        checks.compared_group(self, group_size)
        checks.prompt_mask(self)
        if not 0 < self.psi <= 1e6:
            raise UserError(f"objective.psi = {self.psi}: expected a positive number up to 1e6")
        if not 0 <= self.negative <= 1:
            raise UserError(f"objective.negative = {self.negative}: expected 0 (positive weights only) to 1")


def signed_weights(reward: jax.Array, psi: float, negative: float) -> tuple[jax.Array, jax.Array]:
    """(w+ - negative x w-, w+), both `f32[P, N]`; rewards that are not finite have weight 0."""
    mass, advantage = group.log_mass_of(reward), psi * pg.advantages(reward, "mean")
    positive = group.softmax(advantage, mass)
    return positive - negative * group.softmax(-advantage, mass), positive


def prepare(
    params: dict, reference: dict, rollout: Rollout, key: jax.Array, config: Config, context: Context
) -> Prepared:
    """Signed weights `f32[P, N]`, which no update changes."""
    signed, positive = signed_weights(rollout.reward, config.psi, config.negative)
    ess = group.effective_sample_size(positive, group.log_mass_of(rollout.reward))
    metrics = pg.rollout_metrics(rollout) | {"ess/mean": jnp.mean(ess), "ess/min": jnp.min(ess)}
    return Prepared(groups={"signed": signed}, whole=(), metrics=metrics)


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update, with the prompt tokens that this update's key hides."""
    prompts = masked_prompts(rollout, key, config.prompt_mask, context.mask_id)
    return loss_on(params, rollout, prepared, prompts, context)


def loss_on(
    params: dict, rollout: Rollout, prepared: Prepared, prompts: Prompts, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update for given, partly hidden prompts of all P * N rows."""
    log_prob = mean_field_log_probs(params, rollout, prompts, context)
    total = jnp.sum(jnp.where(rollout.live, log_prob, 0.0), axis=-1)
    return -jnp.mean(jnp.sum(prepared.groups["signed"] * total, axis=1)), {}
