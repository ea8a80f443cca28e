"""The one place where the denoiser meets the canvas: hidden states from which completion tokens are scored."""

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Canvas, Prompts, make_canvas
from dmpo_jax.model.denoiser import hidden_states
from dmpo_jax.model.parameters import ModelConfig


def completion_hidden(params: dict, shown: jax.Array, prompts: Prompts, config: ModelConfig) -> jax.Array:
    """Hidden states `[B, L, D]` whose row i scores token i of the partly masked completions `shown int32[B, L]`.

    Under `config.logits_shift` these are the outputs one reading position earlier; the first token's is at the
    prompt's last token.
    """
    canvas = make_canvas(shown, prompts, config.attend_to_padding)
    hidden = hidden_states(params, *canvas, config)
    return completion_rows(hidden, canvas, shown.shape[1], config)


def completion_rows(hidden: jax.Array, canvas: Canvas, length: int, config: ModelConfig) -> jax.Array:
    """The rows of a whole canvas's hidden states `[B, S, D]` that score its `length` completion tokens."""
    completion = hidden[:, :length]
    if not config.logits_shift:
        return completion
    before = canvas.positions == canvas.positions[:, :1] - 1  # at most one slot of a row; none without a prompt
    first = jnp.sum(jnp.where(before[..., None], hidden, 0), axis=1, keepdims=True)
    first = jnp.where(jnp.any(before, axis=1)[:, None, None], first, completion[:, :1])
    return jnp.concatenate([first, completion[:, :-1]], axis=1)
