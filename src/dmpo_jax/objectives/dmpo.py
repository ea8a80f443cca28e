"""Distribution Matching Policy Optimization (arXiv 2510.08233).

The target p*(o|q) is proportional to p_ref(o|q) exp(r(q, o) / alpha). Its cross-entropy under the policy is estimated from
rollouts o_1..o_N of the policy p, with self-normalised weights (section 3.1; `importance.py`) less a weight baseline:

    w = softmax_n( c (r / alpha + log p_ref - log p) )
    loss = - mean_P sum_N (w - baseline) ELBO_theta(o) / L

Baselines (eq. 13-15): `group` 1 / N; `individual` the weights of the negated reward; `model` softmax_n(log p_theta - log p).
In expectation the gradient is p* - p_theta without a baseline and with `model`; p* - p with `group`, the same only while
theta has not left the rollout policy; and p* - p^- with `individual`, which never vanishes at p* and keeps sharpening.
No gradient flows through weights or baselines.

With `arithmetic = "published"` (see `importance.py`) the sum over prompts is not averaged either (micro-batches are), and
`model` and `group` reduce over all rows of a call instead of each group.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.masking import Masks
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import checks, group
from dmpo_jax.objectives.importance import (
    WeightConfig,
    from_rows,
    over_rows,
    scored_live,
    weights_on,
)  # fmt: skip
from dmpo_jax.objectives.objective import Context, Prepared, Rollout, elbo_on, normalizer, rollout_masks

ROLLOUT = True
BASELINES = ("model", "group", "individual", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(WeightConfig):
    """Settings of the `dmpo` objective."""

    name: str = "dmpo"
    weights: str = "softmax"  # "reward": the reward itself, without target or reference
    baseline: str = "model"
    centering: float = 1.0  # strength of the baseline
    normalizer: str = "canvas"

    @property
    def has_log_ratio(self) -> bool:
        """Whether the weights depend on log p_ref - log p."""
        return self.alpha > 0 and self.weights == "softmax"

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range, without effect, or against the arithmetic."""
        super().validate(group_size, sampler)
        checks.one_of("baseline", self.baseline, BASELINES)
        if self.baseline == "none" and self.centering != 1.0:
            raise UserError('objective.centering has no effect with objective.baseline = "none"; remove one of them')
        checks.one_of("normalizer", self.normalizer, ("canvas", "live"))
        if self.published:
            self._refuse_exact_settings({"normalizer": "canvas"})
        checks.one_of("weights", self.weights, ("softmax", "reward"))
        if self.weights == "reward":
            self._refuse_softmax_settings()

    def _refuse_softmax_settings(self) -> None:
        if self.baseline not in ("group", "none"):
            raise UserError(
                f'objective.baseline = "{self.baseline}" is made of softmax weights, but objective.weights = "reward"; '
                'set baseline to "group" (the mean reward) or "none"'
            )
        for key in ("alpha", "coefficient", "step_size", "target_ess"):
            value = getattr(self, key)
            if value != WeightConfig.__dataclass_fields__[key].default:
                raise UserError(
                    f'objective.{key} = {checks.as_toml(value)} has no effect with objective.weights = "reward"; leave it out'
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
    if config.weights == "reward":
        rows["weight"] = jnp.where(jnp.isfinite(rollout.reward), rollout.reward, 0.0)
        # Weights of any sign have neither an effective sample size nor an entropy.
        metrics = {k: v for k, v in metrics.items() if not k.startswith(("ess/", "weight_entropy", "coefficient/"))}
    fresh_model = config.baseline == "model" and not config.published
    return Prepared(groups=rows, whole=params if fresh_model else (), metrics=metrics)


def centered_weights(weight: jax.Array, baseline: jax.Array, centering: float, keep: jax.Array) -> jax.Array:
    """(w - centering x baseline) `f32[P, N]`, zero in the groups that are not kept."""
    return jax.lax.stop_gradient(jnp.where(keep, weight - centering * baseline, 0.0))


def weighted_cross_entropy(signed_weight: jax.Array, log_prob: jax.Array, length: jax.Array) -> jax.Array:
    """- mean_P sum_N signed_weight x log_prob / length: the weighted denoising cross-entropy (WDCE)."""
    return -jnp.mean(jnp.sum(signed_weight * log_prob / length, axis=1))


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update on fresh masks."""
    masks = rollout_masks(rollout, scored_live(rollout, config), key, config.masks, config.mask_law)
    return loss_on(params, rollout, prepared, masks, config, context)


def loss_on(
    params: dict, rollout: Rollout, prepared: Prepared, masks: Masks, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update for given masks of all P * N rows.

    The model baseline softmax(log p_theta - log p) compares the parameters now and at the rollout on this update's masks:
    with masks of their own, the two estimates' noise of a few nats would make the softmax near one-hot.
    """
    live, groups = scored_live(rollout, config), prepared.groups
    value = elbo_on(params, rollout, live, masks, context)
    before = groups["log_prob"]
    if config.baseline == "model" and not config.published:
        before = elbo_on(jax.lax.stop_gradient(prepared.whole), rollout, live, masks, context)
    baseline = baseline_of(groups, jax.lax.stop_gradient(value), before, config)
    signed = centered_weights(groups["weight"], baseline, config.centering, groups["keep"])
    value = weighted_cross_entropy(signed, value, normalizer(live, config.normalizer))
    return (value * signed.shape[0] if config.published else value), {}


def baseline_of(groups: dict[str, jax.Array], value: jax.Array, before: jax.Array, config: Config) -> jax.Array:
    """The configured weight baseline `f32[P, N]`; value and before are log p_theta and log p in nats."""
    rows = lambda x: over_rows(x, config)  # noqa: E731
    if config.baseline == "model":
        baseline = group.model_baseline(rows(value), rows(before), rows(groups["log_mass"]))
    elif config.baseline == "group":
        baseline = group.mean(rows(groups["weight"]), rows(groups["log_mass"]))
    else:
        return groups["opposite"] if config.baseline == "individual" else jnp.zeros_like(value)
    return from_rows(baseline, value.shape[0])
