"""diffu-GRPO, the policy gradient of d1 (arXiv 2504.12216): a clipped surrogate per token on the mean-field likelihood.

Every token's log-probability is read off one forward with the whole completion hidden and prompt tokens hidden with
probability 0.15, anew at each update and alike for the policy, the rollout policy and the reference:

    A_n   = r_n - mean of the group
    rho_d = p_theta(o_d | q') / p_old(o_d | q')
    loss  = sum_{n, live d} [ -min(rho_d A_n, clip(rho_d, 1 - eps, 1 + eps) A_n) + beta k3(log p_theta - log p_ref) ] / tokens

k3(x) = exp(-x) + x - 1. Live tokens end with the first end-of-sequence token.

Biased: the sampler never draws all tokens from one fully hidden state, so rho is not a ratio of probabilities of what was
sampled, and the product of the tokens' probabilities is neither an estimate nor a bound of the completion's. It is
exact only for a sampler that commits the whole completion in one step (and with no prompt token hidden).

Unlike the published code: the sum is divided by the tokens of the whole batch, not of one device's micro-batch, so the
loss does not depend on how rows are spread; prompts are hidden by keys of their own instead of by reseeding the
global generator, which there restarts the sampler's noise as well; the reference really follows `reference_sync`, which
there does nothing under adapters.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.objectives import checks
from dmpo_jax.objectives import policy_gradient as pg
from dmpo_jax.objectives.mean_field import masked_prompts, mean_field_log_probs
from dmpo_jax.objectives.objective import Context, Prepared, Rollout

ROLLOUT = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the `diffu_grpo` objective."""

    name: str = "diffu_grpo"
    advantage: str = "mean"  # reward less the group's: mean | leave_one_out | z_score
    epsilon: float = 0.5  # clip range of the ratio on either side of 1
    beta: float = 0.04  # strength of the KL to the reference; 0: none, and no reference forward
    prompt_mask: float = 0.15  # probability that a prompt token is hidden
    updates: int = 12  # gradient updates per rollout batch (mu); 8 for Countdown and Sudoku
    reference_sync: int = 0  # every so many cycles the reference becomes the policy; 0: never

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range."""
        checks.compared_group(self, group_size)
        checks.one_of("advantage", self.advantage, pg.ADVANTAGES)
        checks.clip_and_kl(self)
        checks.prompt_mask(self)


def prepare(
    params: dict, reference: dict, rollout: Rollout, key: jax.Array, config: Config, context: Context
) -> Prepared:
    """Advantages and the batch's mean length, `f32[P, N]`; the rollout policy and, for the KL, the reference."""
    prepared = pg.prepare_advantages(params, reference, rollout, config.advantage, config.beta)
    return prepared._replace(groups=prepared.groups | {"mean_length": pg.mean_length(rollout.live)})


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update, with the prompt tokens that this update's key hides."""
    prompts = masked_prompts(rollout, key, config.prompt_mask, context.mask_id)
    return loss_on(params, rollout, prepared, prompts, config, context)


def loss_on(
    params: dict, rollout: Rollout, prepared: Prepared, prompts: Prompts, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update for given, partly hidden prompts of all P * N rows."""
    return clipped_loss(lambda p: mean_field_log_probs(p, rollout, prompts, context), params, rollout, prepared, config)


def clipped_loss(
    log_probs: Callable[[dict], jax.Array], params: dict, rollout: Rollout, prepared: Prepared, config
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean over live tokens of the clipped surrogate and the KL, of any `log_probs(params) -> f32[P, N, L]`.

    A completion whose reward is not finite has no surrogate; it still counts in the KL, which needs no reward.
    """
    whole, live = jax.lax.stop_gradient(prepared.whole), rollout.live
    mean = lambda values: pg.mean_over_tokens(values, live, prepared.groups["mean_length"])  # noqa: E731
    advantage = prepared.groups["advantage"][..., None]

    log_prob = log_probs(params)
    log_ratio = jnp.where(live, log_prob - log_probs(whole["old"]), 0.0)
    total = -mean(pg.clipped_surrogate(log_ratio, advantage, config.epsilon, config.epsilon))
    share = lambda condition: mean(condition.astype(jnp.float32))  # noqa: E731
    metrics = pg.ratio_metrics(jnp.sum(log_ratio, axis=-1), rollout.reward) | {
        "log_ratio/clamped": share(jnp.abs(log_ratio) > pg.LIMIT),  # of tokens, as the surrogate is theirs
        "ratio/clipped": share(pg.clipped(log_ratio, advantage, config.epsilon)),
    }
    if config.beta:
        kl = mean(pg.kl_k3(jnp.where(live, log_prob - log_probs(whole["reference"]), 0.0)))
        total, metrics["kl"] = total + config.beta * kl, kl
    return total, jax.lax.stop_gradient(metrics)
