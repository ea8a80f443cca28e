"""Log-probabilities of completion tokens when a chosen part of the completion, and some of the prompt, is hidden.

The mean-field likelihood of d1 (diffu-GRPO, arXiv 2504.12216) hides the whole completion and reads every token's
log-probability off one forward: log p(o|q) is taken for sum_d log p(o_d | q). It ignores how the tokens of a completion
depend on each other, so it is neither an estimate nor a bound of log p(o|q). Hiding some prompt tokens at random makes
the forwards of several updates on one rollout batch differ.
"""

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Prompts, repeat
from dmpo_jax.diffusion.elbo import token_log_probs
from dmpo_jax.diffusion.forward import completion_hidden
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.objectives.objective import Context, Rollout
from dmpo_jax.parallel import mesh as meshes
from dmpo_jax.parallel.mesh import by_group, by_row, per_shard


def masked_prompts(rollout: Rollout, key: jax.Array, rate: float, mask_id: int, views: int = 1) -> Prompts:
    """The prompts of all rows, `views` of each, row-major `[P * N * views]`, every token hidden with probability `rate`.

    Keyed by (key, global row): the same key hides the same tokens for every set of parameters, on every mesh.
    """
    prompts = repeat(rollout.prompts, rollout.completion.shape[1])

    def on_shard(key, rows):
        row, prompts = rows
        width = prompts.tokens.shape[1]
        draw = jax.vmap(lambda key: jax.random.uniform(key, (views, width)))(row_keys(key, row))
        real = (jnp.arange(width) < prompts.length[:, None])[:, None]
        tokens = jnp.where((draw < rate) & real, mask_id, prompts.tokens[:, None])
        return Prompts(tokens.reshape(-1, width), jnp.repeat(prompts.length, views))

    return per_shard(on_shard, key, (by_row(rollout.row), prompts))


def view_states(params: dict, rollout: Rollout, prompts: Prompts, hidden: jax.Array, context: Context) -> jax.Array:
    """Hidden states `[P * N, V, L, D]` that score the completions' tokens in V views of each completion.

    hidden `bool[P * N, V, L]` says what a view masks; prompts hold one row per view, as `masked_prompts` makes them.
    """
    shown = jnp.where(hidden, context.mask_id, by_row(rollout.completion)[:, None])
    states = completion_hidden(params, by_row(shown), prompts, context.model)
    shape = (*hidden.shape, context.model.d_model)
    return jnp.reshape(states, shape, out_sharding=meshes.activation(("rows", None, None, None), shape))


def view_log_probs(params: dict, rollout: Rollout, states: jax.Array, context: Context) -> jax.Array:
    """fp32 log-probability `[P, N, V, L]` of every completion token from states `[P * N, V, L, D]`.

    Of a token that its view shows it means nothing.
    """
    groups = rollout.completion.shape[0]
    targets = jnp.broadcast_to(by_row(rollout.completion)[:, None], states.shape[:3])
    return by_group(token_log_probs(params, states, targets, context.model, context.loss_chunk), groups)


def mean_field_log_probs(params: dict, rollout: Rollout, prompts: Prompts, context: Context) -> jax.Array:
    """fp32 log-probability `[P, N, L]` of every completion token with the whole completion hidden."""
    everything = jnp.ones_like(by_row(rollout.live))[:, None]
    states = view_states(params, rollout, prompts, everything, context)
    return view_log_probs(params, rollout, states, context)[:, :, 0]
