"""Log-probabilities of masked tokens and the evidence lower bound (ELBO) that they estimate.

ELBO(o|q) = E_m E_S [ (L/m) sum_{d in S} log p(o_d | q, o with S masked) ] with m uniform on 1..L and S a uniform subset of
size m: the expected log-probability over a uniformly random decoding order.
"""

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Prompts, repeat
from dmpo_jax.diffusion.forward import completion_hidden
from dmpo_jax.diffusion.masking import Masks
from dmpo_jax.model.denoiser import head_logits
from dmpo_jax.model.parameters import ModelConfig
from dmpo_jax.parallel import mesh as meshes


def token_log_probs(
    params: dict, hidden: jax.Array, targets: jax.Array, config: ModelConfig, chunk: int = 32
) -> jax.Array:
    """fp32 log-probability of `targets int32[B, K, L]` under hidden states `[B, K, L, D]`.

    The vocabulary is reached for `chunk` positions at a time (rounded down to a divisor of L) and again in the backward
    pass, so no `[B, L, V]` array exists.
    """
    length = targets.shape[2]
    size = max(c for c in range(1, min(length, chunk) + 1) if length % c == 0)
    head = {name: params[name] for name in ("embed" if config.tied_head else "head",)}

    def on_shard(head, rows):
        @jax.checkpoint
        def score(part):
            hidden_part, target_part = part
            logits = head_logits(head, hidden_part, config)
            wanted = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == target_part[..., None]
            chosen = jnp.sum(jnp.where(wanted, logits, 0.0), axis=-1)
            return chosen - jax.nn.logsumexp(logits, axis=-1)

        split = lambda x: jnp.moveaxis(x.reshape(*x.shape[:2], length // size, size, *x.shape[3:]), 2, 0)  # noqa: E731
        scores = jax.lax.map(score, jax.tree.map(split, rows))
        return jnp.moveaxis(scores, 0, 2).reshape(rows[1].shape)

    # By shards, so that the head arrives and its gradient leaves once, and not with every chunk.
    return meshes.per_shard(on_shard, head, (hidden, targets), over=meshes.AXES)


def masked_log_probs(
    params: dict,
    prompts: Prompts,
    completion: jax.Array,
    masked: jax.Array,
    live: jax.Array,
    *,
    mask_id: int,
    config: ModelConfig,
    chunk: int = 32,
    paired: bool = True,
) -> jax.Array:
    """`f32[B, R/2, L]`: each live token's log-probability in that member of its antithetic pair which masks it.

    masked `bool[B, R, L]` as in `Masks`, completion `int32[B, L]`. Positions that are not live are masked in every
    replicate and never scored, so what stands there has no effect. A pair masks every live position once: its
    two forwards share one packed head evaluation of L positions. Not paired: `f32[B, R, L]`, every replicate's own.
    """
    batch, replicates, length = masked.shape
    half = replicates // 2
    shown = jnp.where(masked | ~live[:, None], mask_id, completion[:, None])  # [B, R, L]
    hidden = completion_hidden(params, meshes.by_row(shown), repeat(prompts, replicates), config)
    shape = (batch, replicates, length, config.d_model)
    hidden = jnp.reshape(hidden, shape, out_sharding=meshes.activation(("rows", None, None, None), shape))
    if paired:
        hidden = jnp.where(masked[:, :half, :, None], hidden[:, :half], hidden[:, half:])
    targets = jnp.broadcast_to(completion[:, None], hidden.shape[:3])
    return token_log_probs(params, hidden, targets, config, chunk)


def elbo(
    params: dict,
    prompts: Prompts,
    completion: jax.Array,
    masks: Masks,
    live: jax.Array,
    *,
    mask_id: int,
    config: ModelConfig,
    chunk: int = 32,
) -> jax.Array:
    """ELBO estimate `f32[B]` in nats: the mean over replicates of coefficient x sum of masked log-probabilities."""
    scored = _scored(params, prompts, completion, masks, live, mask_id, config, chunk)
    return jnp.sum(scored, axis=(1, 2)) / masks.masked.shape[1]


def elbo_replicates(
    params: dict,
    prompts: Prompts,
    completion: jax.Array,
    masks: Masks,
    live: jax.Array,
    *,
    mask_id: int,
    config: ModelConfig,
    chunk: int = 32,
) -> jax.Array:
    """Every replicate's own estimate `f32[B, R]`, whose mean over R is `elbo`."""
    scored = _scored(params, prompts, completion, masks, live, mask_id, config, chunk)
    if masks.paired:
        first = masks.masked[:, : masks.masked.shape[1] // 2]
        scored = jnp.concatenate([jnp.where(first, scored, 0.0), jnp.where(first, 0.0, scored)], axis=1)
    return jnp.sum(scored, axis=-1)


def _scored(
    params, prompts, completion, masks: Masks, live, mask_id: int, config: ModelConfig, chunk: int
) -> jax.Array:
    """Weighted log-probabilities: `f32[B, R/2, L]` of paired masks, `f32[B, R, L]` of others; 0 where nothing counts."""
    half = masks.masked.shape[1] // 2
    log_probs = masked_log_probs(
        params, prompts, completion, masks.masked, live,
        mask_id=mask_id, config=config, chunk=chunk, paired=masks.paired,
    )  # fmt: skip
    # Select before multiplying: what does not count must not reach the sum even if it is not finite.
    coefficient = masks.coefficient[..., None]
    if masks.paired:
        weight = jnp.where(masks.masked[:, :half], coefficient[:, :half], coefficient[:, half:])
        return jnp.where(live[:, None], log_probs, 0.0) * weight
    return jnp.where(masks.masked & live[:, None], log_probs, 0.0) * coefficient
