"""Distribution Matching Policy Optimization (arXiv 2510.08233).

The target p*(o|q) is proportional to p_ref(o|q) exp(r(q, o) / alpha). Its cross-entropy under the policy is estimated from
rollouts o_1..o_N of the policy p, with self-normalised weights (section 3.1) less a weight baseline (eq. 13-15):

    w = softmax_n( r / alpha + log p_ref - log p )
    loss = - mean_P sum_N (w - baseline) ELBO_theta(o) / L

No gradient flows through weights or baselines.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import repeat
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.diffusion.trajectory import trajectory_log_probs
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import group
from dmpo_jax.objectives.denoise import check_masks
from dmpo_jax.objectives.objective import Context, Prepared, Rollout, normalizer, rollout_elbo
from dmpo_jax.parallel.mesh import by_group, per_shard

ROLLOUT = True
BASELINES = ("model", "group", "individual", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the `dmpo` objective."""

    name: str = "dmpo"
    alpha: float = 0.04  # temperature of the reward in the target, in reward units per nat
    coefficient: float = 1.0  # scales the weight's exponent (proximal step, appendix B.2)
    target_ess: float = 0.0  # above 0: lower the coefficient of a group until its ESS is at least this
    baseline: str = "model"
    centering: float = 1.0  # strength of the baseline
    updates: int = 8  # gradient updates per rollout batch (F)
    masks: int = 4  # mask replicates per completion in the loss (R)
    weight_masks: int = 4  # mask replicates of the ELBOs in the weights
    mask_law: str = "exact"
    log_ratio: str = "elbo"  # of the weights; "trajectory": exact under the roar sampler
    train_after_eos: bool = False
    normalizer: str = "canvas"
    equal_rewards: str = "skip"  # groups whose rewards are all equal: "skip" or "keep"
    reference_sync: int = 0  # every so many cycles the reference becomes the policy; 0: never

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range."""
        if group_size < 2:
            raise UserError(f"rollout.group = {group_size}: dmpo compares the completions of a prompt, set 2 or more")
        if not self.alpha >= 1e-6:
            raise UserError(f"objective.alpha = {self.alpha}: expected a positive number, 1e-6 or more")
        if not self.coefficient > 0:
            raise UserError(f"objective.coefficient = {self.coefficient}: expected a positive number")
        if not 0 <= self.target_ess < 1:
            raise UserError(f"objective.target_ess = {self.target_ess}: expected 0 (off) or a share below 1")
        if self.baseline not in BASELINES:
            raise UserError(f'objective.baseline = "{self.baseline}": expected one of {", ".join(BASELINES)}')
        if self.baseline == "none" and self.centering != 1.0:
            raise UserError('objective.centering has no effect with objective.baseline = "none"; remove one of them')
        if not 1 <= self.updates <= 10_000:
            raise UserError(f"objective.updates = {self.updates}: expected 1 to 10,000")
        if self.log_ratio not in ("elbo", "trajectory"):
            raise UserError(f'objective.log_ratio = "{self.log_ratio}": expected "elbo" or "trajectory"')
        if self.log_ratio == "trajectory" and sampler.algorithm != "roar":
            raise UserError(
                f'objective.log_ratio = "trajectory" needs sampler.algorithm = "roar", found "{sampler.algorithm}"; '
                'only its decoding order is independent of the policy. Use "elbo" with other samplers'
            )
        if self.equal_rewards not in ("skip", "keep"):
            raise UserError(f'objective.equal_rewards = "{self.equal_rewards}": expected "skip" or "keep"')
        if not 0 <= self.reference_sync < 2**31:
            raise UserError(
                f"objective.reference_sync = {self.reference_sync}: expected 0 (never) or a number of cycles"
            )
        check_masks("masks", self.masks, self.mask_law, self.normalizer)
        check_masks("weight_masks", self.weight_masks, self.mask_law, self.normalizer)


def scored_live(rollout: Rollout, config: Config) -> jax.Array:
    """bool `[P, N, L]`: the tokens whose likelihood counts."""
    return jnp.ones_like(rollout.live) if config.train_after_eos else rollout.live


def prepare(
    params: dict, reference: dict, rollout: Rollout, key: jax.Array, config: Config, context: Context
) -> Prepared:
    """Weights and baselines `f32[P, N]` of a rollout batch, with both likelihoods estimated on the same masks."""
    if config.log_ratio == "trajectory":
        policy = jnp.sum(rollout.log_prob, axis=-1)
        log_ratio = _trajectory(reference, rollout, context) - policy
    else:
        live = scored_live(rollout, config)
        args = (rollout, live, key, config.weight_masks, config.mask_law, context)
        log_ratio = rollout_elbo(reference, *args) - rollout_elbo(params, *args)

    mass = group.log_mass_of(rollout.reward)
    coefficient = jnp.full((log_ratio.shape[0], 1), config.coefficient, jnp.float32)
    if config.target_ess > 0:
        scores = group.tilt(rollout.reward, config.alpha) + log_ratio
        coefficient = group.adaptive_coefficient(scores, mass, config.target_ess, config.coefficient)
    weight = group.weights(rollout.reward, log_ratio, config.alpha, coefficient, mass)
    baseline = {
        "individual": lambda: group.individual_baseline(rollout.reward, log_ratio, config.alpha, coefficient, mass),
        "group": lambda: group.group_baseline(mass),
    }.get(config.baseline, lambda: jnp.zeros_like(weight))()

    equal = group.equal_rewards(rollout.reward)
    keep = ~equal if config.equal_rewards == "skip" else jnp.ones_like(equal)
    ess = group.effective_sample_size(weight, mass)
    metrics = {
        "ess/mean": jnp.mean(ess),
        "ess/min": jnp.min(ess),
        "log_ratio/mean": jnp.mean(log_ratio),
        "log_ratio/std": jnp.std(log_ratio),
        "coefficient/mean": jnp.mean(coefficient),
        "reward/zero_std_groups": jnp.mean(equal.astype(jnp.float32)),
        "rewards_not_finite": jnp.sum(mass < 0).astype(jnp.float32),
    }
    rows = {"weight": weight, "baseline": baseline, "log_mass": mass, "keep": keep[:, None]}
    return Prepared(groups=rows, whole=params if config.baseline == "model" else (), metrics=metrics)


def centered_weights(weight: jax.Array, baseline: jax.Array, centering: float, keep: jax.Array) -> jax.Array:
    """(w - centering x baseline) `f32[P, N]`, zero in the groups that are not kept."""
    return jax.lax.stop_gradient(jnp.where(keep, weight - centering * baseline, 0.0))


def weighted_cross_entropy(signed_weight: jax.Array, log_prob: jax.Array, length: jax.Array) -> jax.Array:
    """- mean_P sum_N signed_weight x log_prob / length: the weighted denoising cross-entropy (WDCE)."""
    return -jnp.mean(jnp.sum(signed_weight * log_prob / length, axis=1))


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update on fresh masks.

    The model baseline softmax(log p_theta - log p) compares the parameters now and at the rollout on this update's masks:
    with masks of their own, the two estimates' noise of a few nats would make the softmax near one-hot.
    """
    live = scored_live(rollout, config)
    args = (rollout, live, key, config.masks, config.mask_law, context)
    value = rollout_elbo(params, *args)
    groups = prepared.groups
    baseline = groups["baseline"]
    if config.baseline == "model":
        before = rollout_elbo(jax.lax.stop_gradient(prepared.whole), *args)
        baseline = group.model_baseline(jax.lax.stop_gradient(value), before, groups["log_mass"])
    signed = centered_weights(groups["weight"], baseline, config.centering, groups["keep"])
    return weighted_cross_entropy(signed, value, normalizer(live, config.normalizer)), {}


def _trajectory(params: dict, rollout: Rollout, context: Context) -> jax.Array:
    groups, size, length = rollout.completion.shape
    flat = lambda x: x.reshape(-1, length)  # noqa: E731

    def on_shard(params, rows):
        prompts, completion, step = rows
        return trajectory_log_probs(
            params, prompts, completion, step, steps=length, tokens_per_step=1,
            mask_id=context.mask_id, config=context.model,
        )  # fmt: skip

    rows = (repeat(rollout.prompts, size), flat(rollout.completion), flat(rollout.step))
    return by_group(jnp.sum(per_shard(on_shard, params, rows), axis=-1), groups)
