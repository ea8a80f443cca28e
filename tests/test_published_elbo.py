"""ELBO, weights and losses against values computed by the official DMPO code on a tiny LLaDA checkpoint.

The fixtures stand outside the repository; without them these tests are skipped, and the rules they check are held by
enumeration in test_diffusion_elbo.py and test_objectives_group.py.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmpo_jax import load_pretrained
from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.elbo import elbo
from dmpo_jax.diffusion.masking import Masks, coefficients, masks_from_uniforms
from dmpo_jax.objectives import group

FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "fixtures"
pytestmark = pytest.mark.skipif(not FIXTURES.is_dir(), reason="../shared/fixtures is absent")
MASK = 505


@pytest.fixture(scope="module")
def model():
    return load_pretrained(str(FIXTURES / "model"))


@pytest.fixture(scope="module")
def cases():
    meta = json.loads((FIXTURES / "meta.json").read_text())
    return np.load(FIXTURES / "elbo.npz"), meta["elbo"]


def official_masks(data, case):
    """[B, R, L] from rows numbered replicate x batch."""
    return jnp.asarray(data[f"{case}/masked"].astype(bool)).reshape(4, 8, 32).transpose(1, 0, 2)


@pytest.mark.parametrize("case", ["anti1_clamp1", "anti1_clamp0"])
def test_official_elbos(model, cases, case):
    config, params = model
    data, meta = cases
    prompts = Prompts(jnp.asarray(data["prompt_ids"], jnp.int32), jnp.full((8,), 16, jnp.int32))
    completion = jnp.asarray(data["completion_ids"], jnp.int32)
    live = jnp.ones(completion.shape, bool)  # the official code also scores what follows the end of the sequence
    masked = official_masks(data, case)
    found = elbo(
        params, prompts, completion, Masks(masked, coefficients(masked, live, "published")), live,
        mask_id=MASK, config=config,
    )  # fmt: skip
    np.testing.assert_allclose(found, meta[case]["sum_ref"], rtol=1e-5)


@pytest.mark.parametrize(("case", "law"), [("anti1_clamp1", "published"), ("anti1_clamp0", "exact")])
def test_official_uniforms_give_the_official_masks(cases, case, law):
    data, _ = cases
    level = jnp.asarray(data[f"{case}/u_lamda"], jnp.float32).reshape(2, 8).T
    position = jnp.asarray(data[f"{case}/u_mask"], jnp.float32).reshape(2, 8, 32).transpose(1, 0, 2)
    masks = masks_from_uniforms(level, position, jnp.ones((8, 32), bool), law)
    assert np.array_equal(masks.masked, official_masks(data, case))


@pytest.mark.parametrize(
    ("case", "alpha", "coefficient", "size"),
    [("alpha0.04_g8", 0.04, 1.0, 8), ("alpha0.5_g8", 0.5, 1.0, 8), ("alpha4_g8", 4.0, 1.0, 8), ("alpha0.5_g4", 0.5, 1.0, 4),
     ("alpha0.5_coeff0.3_g8", 0.5, 0.3, 8)],
)  # fmt: skip
def test_official_weights(case, alpha, coefficient, size):
    data = np.load(FIXTURES / "weights.npz")
    ratio = data[f"{case}/log_prob_ref_tok"].sum(-1) - data[f"{case}/log_prob_cur"]
    rewards, ratio = jnp.float32(data["rewards"]).reshape(-1, size), jnp.float32(ratio).reshape(-1, size)
    mass = group.log_mass_of(rewards)
    found = group.weights(rewards, ratio, alpha, coefficient, mass)
    np.testing.assert_allclose(found.ravel(), data[f"{case}/advantages"].ravel(), rtol=2e-4, atol=1e-7)
    negative = group.individual_baseline(rewards, ratio, alpha, coefficient, mass)
    np.testing.assert_allclose(negative.ravel(), data[f"{case}/negative_advantages"].ravel(), rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("case", "target", "alpha"), [("alpha0.5_ada0.8_g8", 0.8, 0.5), ("alpha0.04_ada0.8_g8", 0.8, 0.04)]
)
def test_official_adaptive_coefficient(case, target, alpha):
    """With one group per device, the official coefficient is the group's own."""
    data = np.load(FIXTURES / "weights.npz")
    ratio = jnp.float32(data[f"{case}/log_prob_ref_tok"].sum(-1) - data[f"{case}/log_prob_cur"])[None]
    rewards = jnp.float32(data["rewards"])[None]
    scores = group.tilt(rewards, alpha) + ratio
    found = group.adaptive_coefficient(scores, jnp.zeros((1, 8)), target, 1.0)
    assert float(found[0, 0]) == pytest.approx(float(data[f"{case}/coeff"].ravel()[0]), rel=1e-4)
    weights = group.softmax(found * scores, jnp.zeros((1, 8)))
    np.testing.assert_allclose(weights.ravel(), data[f"{case}/advantages"].ravel(), rtol=5e-4)


def test_gradients_flow_to_every_parameter(model, cases):
    config, params = model
    data, _ = cases
    prompts = Prompts(jnp.asarray(data["prompt_ids"], jnp.int32), jnp.full((8,), 16, jnp.int32))
    completion, live = jnp.asarray(data["completion_ids"], jnp.int32), jnp.ones((8, 32), bool)
    masked = official_masks(data, "anti1_clamp0")
    masks = Masks(masked, coefficients(masked, live, "exact"))
    value = lambda p: jnp.mean(elbo(p, prompts, completion, masks, live, mask_id=MASK, config=config))  # noqa: E731
    grads = jax.grad(value)(params)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))
