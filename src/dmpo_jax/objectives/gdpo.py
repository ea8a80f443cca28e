"""Group Diffusion Policy Optimization (GDPO, arXiv 2510.08554): a clipped ratio of whole completions from a quadrature ELBO.

Most of the variance of an ELBO estimate comes from its random mask share t, and its integrand is smooth in t. So t is
integrated by Gauss-Legendre nodes t_n and weights w_n on [0, 1], and only the masks are random:

    E = sum_n (w_n / t_n) sum_{d in S_n} log p(o_d | o with S_n masked),    |S_n| = max(1, floor(t_n L)), L live tokens
    rho = exp(E_theta - E_old),    A = r - mean
    loss = - mean_{P,N} [ min(rho A, clip(rho, 1 - epsilon, 1 + epsilon) A) / L - beta KL ]

E of theta, of the rollout policy and of the reference are on the same masks. E has a small bias: that of the quadrature, which
is exact for integrands of degree 2 n - 1 in t, and that of rounding t_n L down, with three nodes 1 % of the ELBO at a hundred
tokens and 4 % at twenty. `node_weight = "share"` divides by the share k / L that is really masked instead of t_n, which takes
the bias of rounding out of what does not depend on t. rho is a ratio of ELBOs, not of probabilities: the method's own bias.

The paper leaves the estimator of the KL term open; here it is (E_theta - E_ref)^2 / (2 L), as in ESPO. A port to another
trainer takes rho = exp((E_theta - E_old) / L): `ratio = "per_token"`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dmpo_jax.diffusion.masking import Masks, draw_counted, row_keys
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import checks
from dmpo_jax.objectives import policy_gradient as pg
from dmpo_jax.objectives.importance import scored_live
from dmpo_jax.objectives.objective import Context, Prepared, Rollout
from dmpo_jax.objectives.sequence import elbo_changes, live_length, penalised
from dmpo_jax.parallel.mesh import by_row, per_shard

ROLLOUT = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the `gdpo` objective."""

    name: str = "gdpo"
    nodes: int = 3  # of the quadrature over the mask share
    draws: int = 1  # masks per node, completion and update
    node_weight: str = "node"  # w / t as published; "share": w / (masked share), without the bias of rounding t L
    ratio: str = "sequence"  # rho of the completion; "per_token": its L-th root
    epsilon: float = 0.2  # of the clip
    beta: float = 0.0  # strength of the KL term to the reference; 0: no reference is evaluated
    updates: int = 8  # gradient updates per rollout batch
    train_after_eos: bool = False
    reference_sync: int = 0  # every so many cycles the reference becomes the policy; 0: never

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range or without effect."""
        checks.compared_group(self, group_size)
        checks.clip_and_kl(self, zero_epsilon=True)
        for key, most in (("nodes", 64), ("draws", 1000)):
            if not 1 <= getattr(self, key) <= most:
                raise UserError(f"objective.{key} = {getattr(self, key)}: expected 1 to {most}")
        checks.one_of("node_weight", self.node_weight, ("node", "share"))
        checks.one_of("ratio", self.ratio, ("sequence", "per_token"))


@functools.cache
def gauss_legendre(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights `f64[nodes]` of Gauss-Legendre quadrature on [0, 1]."""
    point, weight = np.polynomial.legendre.leggauss(nodes)
    return 0.5 * (point + 1.0), 0.5 * weight


def quadrature_masks(keys: jax.Array, live: jax.Array, nodes: int, draws: int, node_weight: str) -> Masks:
    """Masks of `draws` per node over live positions `bool[B, L]`, whose mean over R = nodes x draws is the module's E.

    Every row has its own key `[B]`; replicates of a node stand together.
    """
    node, weight = (jnp.repeat(jnp.float32(x), draws) for x in gauss_legendre(nodes))
    length = jnp.sum(live, axis=-1, keepdims=True)
    count = jnp.maximum(jnp.floor(node * length.astype(jnp.float32)).astype(jnp.int32), 1)
    count = jnp.minimum(count, length)
    share = node if node_weight == "node" else count / jnp.maximum(length, 1)
    scale = jnp.where(count > 0, nodes * weight / jnp.where(count > 0, share, 1.0), 0.0)
    return Masks(draw_counted(keys, count, live), scale, paired=False)


def prepare(
    params: dict, reference: dict, rollout: Rollout, key: jax.Array, config: Config, context: Context
) -> Prepared:
    """Mean-centred advantages `f32[P, N]`, and the policies that the updates compare with."""
    return pg.prepare_advantages(params, reference, rollout, "mean", config.beta)


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update on fresh masks."""
    live = scored_live(rollout, config)
    masks = per_shard(
        lambda key, rows: quadrature_masks(
            row_keys(key, rows[0]), rows[1], config.nodes, config.draws, config.node_weight
        ),
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
    log_ratio = change / length if config.ratio == "per_token" else change
    surrogate = pg.clipped_surrogate(log_ratio, prepared.groups["advantage"], config.epsilon, config.epsilon)
    return penalised(surrogate / length, log_ratio, pg.kl_k2(drift) / length, rollout, config.beta)
