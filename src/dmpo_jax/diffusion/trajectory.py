"""Exact log-probability of a decoded completion given the order in which it was committed."""

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.forward import completion_hidden
from dmpo_jax.diffusion.proposal import filtered, forbid, log_prob_of
from dmpo_jax.model.denoiser import head_logits
from dmpo_jax.model.parameters import ModelConfig


def trajectory_log_probs(
    params: dict,
    prompts: Prompts,
    completion: jax.Array,
    step: jax.Array,
    *,
    steps: int,
    tokens_per_step: int,
    mask_id: int,
    config: ModelConfig,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> jax.Array:
    """`f32[B, L]`: each token's log-probability at the step that committed it, by teacher forcing; 0 where step is -1.

    completion and step `int32[B, L]` as in `sampler.Trace`. One forward for each of `steps` steps, in which at most
    `tokens_per_step` tokens of a row were committed. With the parameters that decoded, this repeats the trace's
    log_prob (under the temperature and filters that sampled, its sampled_log_prob); with others, it is the same
    trajectory's probability under them. The trace must come from a sampler without a cache that revises nothing. Under
    `config.block_size`, tokens of a last block that reaches beyond the completion were decoded beside some that no trace
    holds; theirs come out as if these had stayed masked.
    """

    def at_step(total, now):
        shown = jnp.where((step >= now) | (step < 0), mask_id, completion)
        hidden = completion_hidden(params, shown, prompts, config)
        chosen, position = jax.lax.top_k((step == now).astype(jnp.int32), tokens_per_step)
        hidden = jnp.take_along_axis(hidden, position[..., None], axis=1)
        logits = forbid(head_logits(params, hidden, config), mask_id)
        token = jnp.take_along_axis(completion, position, axis=1)
        if temperature != 1.0 or top_k or top_p < 1.0:
            logits = filtered(logits / temperature, top_k, top_p)
        log_prob = log_prob_of(logits, token)
        rows = jnp.arange(completion.shape[0])[:, None]
        return total.at[rows, position].add(jnp.where(chosen > 0, log_prob, 0.0)), None

    total, _ = jax.lax.scan(at_step, jnp.zeros(completion.shape, jnp.float32), jnp.arange(steps, dtype=jnp.int32))
    return total
