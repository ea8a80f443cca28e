"""The one place where the denoiser meets the canvas: hidden states from which completion tokens are scored."""

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Canvas, Prompts, make_canvas
from dmpo_jax.diffusion.workspace import lay_out
from dmpo_jax.model.denoiser import hidden_states
from dmpo_jax.model.parameters import ModelConfig
from dmpo_jax.parallel.mesh import in_turn, per_shard


def completion_hidden(params: dict, shown: jax.Array, prompts: Prompts, config: ModelConfig) -> jax.Array:
    """Hidden states `[B, L, D]` whose row i scores token i of the partly masked completions `shown int32[B, L]`.

    Under `config.logits_shift` these are the outputs one reading position earlier; the first token's is at the
    prompt's last token.
    """
    canvas = make_canvas(shown, prompts, config.attend_to_padding)
    length = shown.shape[1]
    score = lambda part: completion_rows(hidden_states(params, *part, config), part, length, config)  # noqa: E731
    return in_turn(score, canvas, config.rows_at_once)


def completion_rows(hidden: jax.Array, canvas: Canvas, length: int, config: ModelConfig) -> jax.Array:
    """The rows of a whole canvas's hidden states `[B, S, D]` that score its `length` completion tokens."""
    completion = hidden[:, :length]
    if not config.logits_shift:
        return completion
    before = canvas.positions == canvas.positions[:, :1] - 1  # at most one slot of a row; none without a prompt
    first = jnp.sum(jnp.where(before[..., None], hidden, 0), axis=1, keepdims=True)
    first = jnp.where(jnp.any(before, axis=1)[:, None, None], first, completion[:, :1])
    return jnp.concatenate([first, completion[:, :-1]], axis=1)


def doubled_hidden(
    params: dict, noisy: jax.Array, clean: jax.Array, prompts: Prompts, mask_id: int, config: ModelConfig
) -> jax.Array:
    """Hidden states `[B, L, D]` of partly masked completions, each block of which reads clean blocks before itself.

    For a model with `config.block_size`: `noisy` and `clean int32[B, L]` stand side by side, `[noisy | clean | prompt]`, L a
    multiple of the block. A noisy block sees itself, the clean blocks before it and the prompt; a clean block those up to
    itself. So one forward gives what a forward for every block would, with that block noisy and the ones before it
    clean. Prompt tokens that share the completion's first block are doubled with it.
    """
    length, block = noisy.shape[1], config.block_size

    def on_shard(_, rows):
        noisy, clean, prompts = rows
        space = lay_out(prompts, length, block, mask_id, config)
        width = space.tokens.shape[1]
        slot = jnp.arange(width, dtype=jnp.int32) - space.lead[:, None]
        inside = (slot >= 0) & (slot < length)

        def placed(completion):
            moved = jnp.take_along_axis(completion, jnp.clip(slot, 0, length - 1), axis=1)
            return jnp.where(inside, moved, space.tokens)

        tokens = jnp.concatenate([placed(noisy), placed(clean), space.prompts.tokens], axis=1)
        positions = jnp.concatenate([space.positions[:, :width], space.positions], axis=1)
        return Canvas(tokens, positions, space.lengths + width), space.lead

    canvas, lead = per_shard(on_shard, (), (noisy, clean, prompts))
    width = length + block
    visible = _doubled_visible(width, block, canvas.tokens.shape[1])

    def score(part):
        canvas, lead = part
        hidden = hidden_states(params, *canvas, config, visible=visible)
        return rows_at(hidden, lead[:, None] + jnp.arange(length, dtype=jnp.int32))

    return in_turn(score, (canvas, lead), config.rows_at_once)


def _doubled_visible(width: int, block: int, slots: int) -> jax.Array:
    """bool `[S, S]` (query, key), on top of the rule that no query sees a later block."""
    slot = jnp.arange(slots)
    noisy = slot < width
    number = jnp.where(slot < 2 * width, slot % width // block, -1)  # of the prompt: before all others
    own = noisy & (number == number[:, None])
    earlier = ~noisy & (number < number[:, None])
    return jnp.where(noisy[:, None], own | earlier, ~noisy)


def rows_at(hidden: jax.Array, position: jax.Array) -> jax.Array:
    """Rows `[B, W, D]` of hidden states `[B, S, D]` at `position int32[B, W]`."""
    return jnp.take_along_axis(hidden, position[..., None], axis=1)
