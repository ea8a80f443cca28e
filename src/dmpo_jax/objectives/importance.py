"""Importance weights from rollouts to the target distribution: what DMPO's two losses share (arXiv 2510.08233, section 3.1).

The target p*(o|q) is proportional to p_ref(o|q) exp(r(q, o) / alpha), and rollouts o_1..o_N come from the policy p. In a group,

    w = softmax_n( c (r / alpha + log p_ref - log p) ),    opposite = softmax_n( c (-r / alpha + log p_ref - log p) ).

c = 1 aims at p* itself. A proximal step of size eta (appendix B.2) has c = eta alpha / (eta alpha + 1); with alpha = 0 the
exponent is eta r, without any log-ratio. Both log-probabilities are ELBOs on the same masks, whose noise of a few nats mostly
cancels in the difference, or exact trajectory log-probabilities. Self-normalised weights are biased by O(1/N); exponentials
of estimates also by the noise that is left (`log_ratio/std` shows it together with the true spread).

`arithmetic = "published"` reproduces the official code as it computes on one device that holds all rows of a call: masking
rates 0.1 + 0.9 u, coefficients n / m, tokens after the end counted, one adaptive coefficient in [0.01, 0.99] for all rows, and
log p kept from the weights' masks instead of evaluated anew. Its code also lets dropout act on log p alone, attends to pads
(`model.attend_to_padding`) and rounds sums to bfloat16; the first and the last are not repeated.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import repeat
from dmpo_jax.diffusion.masking import Masks
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.diffusion.trajectory import trajectory_log_probs
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import checks, group
from dmpo_jax.objectives.objective import Context, Rollout, elbo_on
from dmpo_jax.objectives.policy_gradient import rollout_metrics
from dmpo_jax.parallel.mesh import by_group, by_row, per_shard, replicated

# What each arithmetic settles where a setting is left out.
SETTLED = {
    "exact": {"mask_law": "exact", "train_after_eos": False, "equal_rewards": "skip"},
    "published": {"mask_law": "published", "train_after_eos": True, "equal_rewards": "keep"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightConfig:
    """Settings of the weights, common to `dmpo` and `wddo`."""

    arithmetic: str = "exact"  # "published": that of the official code, faults included, for comparison
    alpha: float = 0.04  # temperature of the reward in the target, in reward units per nat; 0: no log-ratio
    coefficient: float = 1.0  # c, scales the weight's exponent; with alpha = 0 it is the step size eta itself
    step_size: float = 0.0  # eta, in place of coefficient: c = eta alpha / (eta alpha + 1); 0: coefficient decides
    target_ess: float = 0.0  # above 0: lower the coefficient of a group until its ESS is at least this
    updates: int = 8  # gradient updates per rollout batch (F)
    masks: int = 4  # mask replicates per completion in the loss (R)
    weight_masks: int = 4  # mask replicates of the ELBOs in the weights
    mask_law: str = ""  # "exact" or "published"; left out: as the arithmetic
    log_ratio: str = "elbo"  # of the weights; "trajectory": exact under the roar sampler
    train_after_eos: bool = None  # count the tokens after the end too; left out: false, in published arithmetic true
    equal_rewards: str = ""  # groups whose rewards are all equal: "skip", or "keep" (published arithmetic)
    reference_sync: int = 0  # every so many cycles the reference becomes the policy; 0: never

    def __post_init__(self):
        """Fills in what the arithmetic settles, so that a resolved configuration says what was done."""
        for key, value in SETTLED.get(self.arithmetic, SETTLED["exact"]).items():
            if getattr(self, key) in ("", None):
                object.__setattr__(self, key, value)

    @property
    def published(self) -> bool:
        """Whether the official code's arithmetic is reproduced."""
        return self.arithmetic == "published"

    @property
    def scale(self) -> float:
        """c of the module's equation; with alpha = 0, eta."""
        if not self.step_size:
            return self.coefficient
        return self.step_size if self.alpha == 0 else self.step_size * self.alpha / (self.step_size * self.alpha + 1.0)

    @property
    def has_log_ratio(self) -> bool:
        """Whether the weights depend on log p_ref - log p."""
        return self.alpha > 0

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range, without effect, or against the arithmetic."""
        checks.compared_group(self, group_size)
        checks.one_of("arithmetic", self.arithmetic, SETTLED)
        if not (self.alpha == 0 or self.alpha >= 1e-6):
            raise UserError(
                f"objective.alpha = {self.alpha}: expected 0 (no log-ratio) or a positive number, 1e-6 or more"
            )
        if not self.coefficient > 0:
            raise UserError(f"objective.coefficient = {self.coefficient}: expected a positive number")
        if self.step_size < 0:
            raise UserError(
                f"objective.step_size = {self.step_size}: expected a positive number, or 0 (no proximal step)"
            )
        if self.step_size and self.coefficient != 1.0:
            raise UserError(
                f"objective.step_size = {self.step_size} and objective.coefficient = {self.coefficient} both scale the "
                "weights' exponent; leave one out"
            )
        if not 0 <= self.target_ess < 1:
            raise UserError(f"objective.target_ess = {self.target_ess}: expected 0 (off) or a share below 1")
        checks.one_of("log_ratio", self.log_ratio, ("elbo", "trajectory"))
        if self.log_ratio == "trajectory" and sampler.algorithm != "roar":
            raise UserError(
                f'objective.log_ratio = "trajectory" needs sampler.algorithm = "roar", found "{sampler.algorithm}"; '
                'only its decoding order is independent of the policy. Use "elbo" with other samplers'
            )
        checks.one_of("equal_rewards", self.equal_rewards, ("skip", "keep"))
        checks.reference_sync(self)
        if not self.has_log_ratio:
            self._refuse_log_ratio_settings()
        for key in ("masks", "weight_masks"):
            checks.masks(key, getattr(self, key), self.mask_law)
        if self.published:
            self._refuse_exact_settings(SETTLED["published"])

    def _refuse_log_ratio_settings(self) -> None:
        for key, unset in (("log_ratio", "elbo"), ("reference_sync", 0)):
            value = getattr(self, key)
            if value != unset:
                raise UserError(
                    f"objective.{key} = {checks.as_toml(value)} has no effect: with objective.alpha = {self.alpha} and these "
                    "weights no log-ratio to the reference is used; leave it out"
                )

    def _refuse_exact_settings(self, settled: dict) -> None:
        for key, value in settled.items():
            if getattr(self, key) != value:
                raise UserError(
                    f"objective.{key} = {checks.as_toml(getattr(self, key))} contradicts objective.arithmetic = "
                    f'"published", which has {checks.as_toml(value)}; leave {key} out, or use arithmetic = "exact"'
                )


def scored_live(rollout: Rollout, config: WeightConfig) -> jax.Array:
    """bool `[P, N, L]`: the tokens whose likelihood counts."""
    return jnp.ones_like(rollout.live) if config.train_after_eos else rollout.live


def log_ratio_on(
    params: dict, reference: dict, rollout: Rollout, masks: Masks, config: WeightConfig, context: Context
) -> tuple[jax.Array, jax.Array]:
    """(log p_ref - log p, log p) `f32[P, N]` in nats, p being the policy that rolled out; zeros where they are not needed."""
    if config.log_ratio == "trajectory":
        policy = jnp.sum(rollout.log_prob, axis=-1)
        return _trajectory(reference, rollout, context) - policy, policy
    zeros = jnp.zeros_like(rollout.reward)
    live = scored_live(rollout, config)
    if not config.has_log_ratio:
        return zeros, elbo_on(params, rollout, live, masks, context) if config.published else zeros
    target = elbo_on(reference, rollout, live, masks, context)
    policy = elbo_on(params, rollout, live, masks, context)
    return target - policy, policy


def weights_of(
    reward: jax.Array, log_ratio: jax.Array, config: WeightConfig
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Weights of the module's equation, and metrics, for given rewards and log-ratios `f32[P, N]`.

    weight and opposite `f32[P, N]` sum to 1 over the group; log_mass `f32[P, N]` leaves rewards that are not finite out;
    keep `bool[P, 1]` is false for groups to skip.
    """
    mass = group.log_mass_of(reward)
    alpha = config.alpha if config.alpha > 0 else 1.0
    coefficient = jnp.full((reward.shape[0], 1), config.scale, jnp.float32)
    if config.target_ess > 0:
        scores = over_rows(group.tilt(reward, alpha) + log_ratio, config)
        most = 0.99 if config.published else config.scale
        coefficient = group.adaptive_coefficient(scores, over_rows(mass, config), config.target_ess, most)
        if config.published:
            coefficient = jnp.maximum(jnp.broadcast_to(coefficient, (reward.shape[0], 1)), 0.01)
    weight = group.weights(reward, log_ratio, alpha, coefficient, mass)
    equal = group.equal_rewards(reward)
    keep = ~equal if config.equal_rewards == "skip" else jnp.ones_like(equal)
    rows = {
        "weight": weight,
        "opposite": group.individual_baseline(reward, log_ratio, alpha, coefficient, mass),
        "log_mass": mass,
        "keep": keep[:, None],
    }
    ess = group.effective_sample_size(weight, mass)
    metrics = {
        "ess/mean": jnp.mean(ess),
        "ess/min": jnp.min(ess),
        "weight_entropy": jnp.mean(group.entropy(weight)),
        "log_ratio/mean": jnp.mean(log_ratio),
        "log_ratio/std": jnp.std(log_ratio),
        "coefficient/mean": jnp.mean(coefficient),
    }
    return rows, metrics


def weights_on(
    params: dict, reference: dict, rollout: Rollout, masks: Masks, config: WeightConfig, context: Context
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """`weights_of` a rollout batch for given masks, with the rollout policy's own log-probability as `log_prob`."""
    log_ratio, policy = log_ratio_on(params, reference, rollout, masks, config, context)
    rows, metrics = weights_of(rollout.reward, log_ratio, config)
    if config.has_log_ratio and config.log_ratio == "elbo" and not config.train_after_eos:
        metrics["decoded_minus_elbo"] = decoded_minus_elbo(rollout, policy)
    return rows | {"log_prob": policy}, metrics | rollout_metrics(rollout)


def decoded_minus_elbo(rollout: Rollout, elbo: jax.Array) -> jax.Array:
    """Scalar, nats per token: how much surer the sampler was of what it decoded than the loss's likelihood is.

    The mean over completions of (sum of the decoding's log-probabilities - ELBO) / live tokens. A sampler that picks an order
    that suits it lies above 0; it is the drift that shows sampler and trainer parting (caches, filters, precision).
    """
    decoded = jnp.sum(jnp.where(rollout.live, rollout.log_prob, 0.0), axis=-1)
    return jnp.mean((decoded - elbo) / jnp.maximum(jnp.sum(rollout.live, axis=-1), 1))


def over_rows(x: jax.Array, config: WeightConfig) -> jax.Array:
    """`[P, N]` as the rows that reductions run over: by group, or `[1, P * N]` as a device of the official code has them."""
    return replicated(x.reshape(-1)[None]) if config.published else x


def from_rows(x: jax.Array, groups: int) -> jax.Array:
    """What `over_rows` gave, as `[P, N]` again."""
    return by_group(x.reshape(-1), groups)


def _trajectory(params: dict, rollout: Rollout, context: Context) -> jax.Array:
    groups, size, length = rollout.completion.shape

    def on_shard(params, rows):
        prompts, completion, step = rows
        return trajectory_log_probs(
            params, prompts, completion, step, steps=length, tokens_per_step=1,
            mask_id=context.mask_id, config=context.model,
        )  # fmt: skip

    rows = (repeat(rollout.prompts, size), by_row(rollout.completion), by_row(rollout.step))
    return by_group(jnp.sum(per_shard(on_shard, params, rows), axis=-1), groups)
