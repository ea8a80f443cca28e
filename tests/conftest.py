"""Eight fake devices for every test, programs that compile quickly, and a tiny policy."""

import os

# A fraction of the compile time for programs that run for milliseconds; must be set before JAX starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

from dmpo_jax.model.parameters import ModelConfig, init_params  # noqa: E402


@pytest.fixture(scope="session")
def tiny_model():
    """(config, params): 7 tokens, of which 5 is the mask and 6 the end of the sequence."""
    config = ModelConfig(vocab_size=7, d_model=16, n_layers=2, n_heads=2, d_mlp=24, rope_theta=100.0)
    params = init_params(jax.random.key(3), config)
    # Random initial logits are nearly uniform; larger ones make wrong numbers visible.
    return config, {**params, "head": params["head"] * 3.0}
