"""What a denoising step recomputes: everything, or a window of slots against cached keys and values of the rest."""

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.diffusion.workspace import Workspace
from dmpo_jax.model.denoiser import Cache, cached_hidden_states, fill_cache, hidden_states
from dmpo_jax.model.parameters import ModelConfig

Start = jax.Array | int  # first slot of the active block; an int where the window's size depends on it


class Forwards:
    """The denoiser as the block loop calls it: hidden states `[B, block, D]` that score the active block's tokens."""

    def __init__(self, params: dict, space: Workspace, block: int, sampler: SamplerConfig, config: ModelConfig):
        self._params, self._space, self._config = params, space, config
        self._block, self._sampler = block, sampler
        self._shift = int(config.logits_shift)
        self._width = space.tokens.shape[1]

    def prefill(self) -> Cache | None:
        """The prompt's keys and values, where they never change; the cache to be carried from block to block, else None."""
        if self._sampler.cache != "block":
            return None
        c, prompts = self._config, self._space.prompts
        slots = self._width + prompts.tokens.shape[1]
        shape = (c.n_layers, len(prompts.tokens), c.kv_heads, slots, c.head_size)
        empty = jnp.zeros(shape, jnp.dtype(c.dtype))
        return self._cached(prompts.tokens, self._width, Cache(empty, empty))[1]

    def open(self, shown: jax.Array, start: Start, cache: Cache | None) -> tuple[jax.Array, Cache]:
        """A block's first forward, which also makes or extends the cache. `shown int32[B, W]`: working slots, masks in."""
        if self._sampler.cache == "block":  # its keys of the block before, now clean, and its own in one pass
            first = jnp.maximum(start - self._block, 0)
            size = min(2 * self._block, self._width)
            hidden, cache = self._cached(jax.lax.dynamic_slice_in_dim(shown, first, size, 1), first, cache)
            return self._rows(hidden, start - first), cache
        hidden, cache = fill_cache(self._params, *self._canvas(shown), self._config, visible=self._visible(start))
        return self._rows(hidden, start), cache

    def again(self, shown: jax.Array, start: Start, cache: Cache | None) -> jax.Array:
        """Any forward but a block's first (every forward without a cache)."""
        if cache is None:
            return self._rows(hidden_states(self._params, *self._canvas(shown), self._config), start)
        first, size = self.window(start)
        part = jax.lax.dynamic_slice_in_dim(shown, first, size, 1)
        hidden, _ = self._cached(part, first, cache, self._visible(start))
        return self._rows(hidden, start - first)

    def branches(self, drafts: jax.Array, start: Start, cache: Cache) -> jax.Array:
        """`[B, D, block, D]` of drafts `int32[B, D, W]`: each sees itself in the window and the cache outside it."""
        first, size = self.window(start)
        count, batch = drafts.shape[1], drafts.shape[0]
        own = jax.lax.dynamic_slice_in_dim(drafts, first, size, 2).reshape(batch, count * size)
        added = count * size
        cache = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, 0), (added, 0), (0, 0))), cache)
        places = jax.lax.dynamic_slice_in_dim(self._space.positions, first, size, 1)
        positions = jnp.concatenate([jnp.tile(places, (1, count)), self._space.positions], axis=1)
        branch, slot = jnp.arange(added) // size, jnp.arange(positions.shape[1] - added)
        outside = (slot < first) | (slot >= first + size)
        rest = self._visible(start)
        outside = outside if rest is None else outside & rest[0]
        visible = jnp.concatenate([branch[:, None] == branch, jnp.broadcast_to(outside, (added, len(slot)))], axis=1)
        hidden, _ = cached_hidden_states(
            self._params, own, 0, positions, self._space.lengths + added, cache, self._config, visible=visible
        )
        hidden = hidden.reshape(batch * count, size, -1)
        return self._rows(hidden, start - first).reshape(batch, count, self._block, -1)

    def with_shadow(self, shown: jax.Array, start: Start, mask_id: int) -> tuple[jax.Array, jax.Array]:
        """`[B, block, D]` twice: as usual, and of as many masks that read at the block's places.

        Each of these sees everything but the token whose place it has, and nothing sees them (WINO).
        """
        block, space = self._block, self._space
        tokens, positions, lengths = self._canvas(shown)
        shadow = jnp.full((len(shown), block), mask_id, jnp.int32)
        places = jax.lax.dynamic_slice_in_dim(space.positions, start, block, 1)
        slot = jnp.arange(block + tokens.shape[1])
        is_shadow = slot < block
        hidden_token = (slot - block - start) == slot[:block, None]
        visible = jnp.where(is_shadow[:, None], True, ~is_shadow)
        visible = visible.at[:block].set(is_shadow | ~hidden_token)
        hidden = hidden_states(
            self._params,
            jnp.concatenate([shadow, tokens], axis=1),
            jnp.concatenate([places, positions], axis=1),
            lengths + block,
            self._config,
            visible=visible,
        )
        return self._rows(hidden[:, block:], start), hidden[:, :block]

    def window(self, start: Start) -> tuple[Start, int]:
        """First slot and number of the slots that a cached forward recomputes."""
        if self._sampler.cache == "prefix":
            after = self._sampler.suffix_window or self._width
            return start, min(self._block + self._shift + after, self._width - start)
        size = min(self._block + self._shift + 2 * self._sampler.vicinity, self._width)
        return jnp.clip(start - self._sampler.vicinity, 0, self._width - size), size

    def processed(self, start: Start, opening: bool) -> jax.Array | int:
        """Tokens that one forward pushes through the network, `int32[B]` or a number; drafts and shadows count too."""
        cache, drafts = self._sampler.cache, self._sampler.drafts or 1
        if cache == "block":
            return min(2 * self._block, self._width) if opening else drafts * self._block
        if cache == "none" or opening:
            return self._space.lengths + (self._block if self._sampler.algorithm == "wino" else 0)
        return drafts * self.window(start)[1]

    def _visible(self, start: Start) -> jax.Array | None:
        after = self._sampler.suffix_window
        if not after:
            return None
        slot = jnp.arange(self._space.positions.shape[1])
        near = slot < start + self._block + self._shift + after
        return (near | (slot >= self._width - 1))[None]

    def _canvas(self, shown: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        space = self._space
        return jnp.concatenate([shown, space.prompts.tokens], axis=1), space.positions, space.lengths

    def _cached(self, tokens, first, cache, visible=None):
        space = self._space
        return cached_hidden_states(
            self._params, tokens, first, space.positions, space.lengths, cache, self._config, visible=visible
        )

    def _rows(self, hidden: jax.Array, first: Start) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(hidden, first, self._block, 1)
