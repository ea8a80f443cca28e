"""Prompts of different lengths in one batch: pads change nothing, unless they are asked to."""

import dataclasses

import hf_checkpoints as hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmpo_jax import load_pretrained
from dmpo_jax.diffusion.canvas import Prompts, make_canvas
from dmpo_jax.diffusion.forward import completion_hidden
from dmpo_jax.model.denoiser import head_logits

PAD, WIDTH, LENGTH = 250, 12, 8
LENGTHS = (12, 4, 8, 1)  # SDAR's blocks of 4 begin at absolute positions


@pytest.fixture(scope="module", params=hf.CONFIGS)
def model(request, tmp_path_factory):
    """(config.json, tensors, config, params, prompts, completions) of one family."""
    content = hf.CONFIGS[request.param]
    tensors = hf.random_tensors(content, seed=4)
    config, params = load_pretrained(hf.write_checkpoint(tmp_path_factory.mktemp("m"), content, tensors))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 240, n) for n in LENGTHS]
    return content, tensors, config, params, prompts, rng.integers(0, 240, (len(LENGTHS), LENGTH))


def batch_of(prompts, pad=PAD):
    rows = np.full((len(prompts), WIDTH), pad, np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return Prompts(jnp.asarray(rows), jnp.array([len(p) for p in prompts]))


@jax.jit(static_argnames="config")
def scores(params, completion, prompts, config):
    return head_logits(params, completion_hidden(params, completion, prompts, config), config)


def scoring_rows(content, logits, first):
    """Of one row's released logits, those that score the completion beginning at position `first`."""
    early = content["model_type"] == "Dream"  # shifted: the output at i - 1 scores token i
    return logits[first - early : first - early + LENGTH]


def test_a_padded_batch_equals_its_rows_alone(model):
    content, tensors, config, params, prompts, completions = model
    found = scores(params, jnp.asarray(completions), batch_of(prompts), config)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        wanted = hf.forward(content, tensors, [*prompt, *completion])
        np.testing.assert_allclose(found[row], scoring_rows(content, wanted, len(prompt)), atol=5e-5)
        # The same from the side: a batch padded on the left whose keys are hidden, as newer official files do it.
        pads = WIDTH - len(prompt)
        if not config.block_size or pads % config.block_size == 0:
            shown = np.arange(WIDTH + LENGTH) >= pads
            left = hf.forward(content, tensors, [*[PAD] * pads, *prompt, *completion], key_mask=shown)
            np.testing.assert_allclose(found[row], scoring_rows(content, left, WIDTH), atol=5e-5)


def test_pads_and_neighbours_have_exactly_no_effect(model):
    _, _, config, params, prompts, completions = model
    found = scores(params, jnp.asarray(completions), batch_of(prompts), config)
    assert np.array_equal(found, scores(params, jnp.asarray(completions), batch_of(prompts, pad=7), config))
    order = [2, 0, 3, 1]
    others = scores(params, jnp.asarray(completions[order]), batch_of([prompts[i] for i in order]), config)
    assert np.array_equal(found[np.array(order)], others)


def test_published_code_attends_to_pads_on_the_left(model):
    content, tensors, config, params, prompts, completions = model
    published = dataclasses.replace(config, attend_to_padding=True)
    found = scores(params, jnp.asarray(completions), batch_of(prompts), published)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        wanted = hf.forward(content, tensors, [*[PAD] * (WIDTH - len(prompt)), *prompt, *completion])
        np.testing.assert_allclose(found[row], scoring_rows(content, wanted, WIDTH), atol=5e-5)
    masked = scores(params, jnp.asarray(completions), batch_of(prompts), config)
    assert np.abs(found - masked)[0].max() < 5e-5  # the widest row has no pads
    assert np.abs(found - masked)[1:].max(axis=(1, 2)).min() > 0.1


def test_nothing_is_lost_behind_pads(model):
    _, _, config, params, prompts, completions = model

    def loss(params):
        hidden = completion_hidden(params, jnp.asarray(completions), batch_of(prompts), config)
        return jnp.sum(head_logits(params, hidden, config) ** 2)

    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_positions_of_both_paddings():
    prompts = Prompts(jnp.zeros((2, 4), jnp.int32), jnp.array([4, 1]))
    canvas = make_canvas(jnp.ones((2, 3), jnp.int32), prompts)
    assert canvas.positions.tolist() == [[4, 5, 6, 0, 1, 2, 3], [1, 2, 3, 0, 1, 2, 3]]
    assert canvas.lengths.tolist() == [7, 4]
    canvas = make_canvas(jnp.ones((2, 3), jnp.int32), prompts, attend_to_padding=True)
    assert canvas.positions.tolist() == [[4, 5, 6, 0, 1, 2, 3], [4, 5, 6, 3, 0, 1, 2]]
    assert canvas.lengths.tolist() == [7, 7]


def test_the_first_token_without_a_prompt_keeps_its_own_row(tmp_path):
    content = hf.DREAM
    tensors = hf.random_tensors(content)
    config, params = load_pretrained(hf.write_checkpoint(tmp_path / "m", content, tensors))
    completion = np.arange(LENGTH)
    found = scores(params, jnp.asarray(completion)[None], batch_of([[]]), config)[0]
    wanted = hf.forward(content, tensors, completion)
    np.testing.assert_allclose(found, np.concatenate([wanted[:1], wanted[:-1]]), atol=5e-5)
