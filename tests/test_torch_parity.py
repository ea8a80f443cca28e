"""PyTorch loads what `dmpo export` writes and computes the same. Slow: needs DMPO_TORCH_PYTHON, an interpreter with
torch, transformers, peft and safetensors."""

import os
import subprocess
from pathlib import Path

import hf_checkpoints as hf
import jax
import numpy as np
import pytest

from dmpo_jax import load_pretrained
from dmpo_jax.model.adapter_folder import write_adapter
from dmpo_jax.model.denoiser import logits
from dmpo_jax.model.families import special_ids
from dmpo_jax.model.lora import LoraConfig, attach, init_adapters
from dmpo_jax.model.pretrained import export_checkpoint
from dmpo_jax.model.weights import merge

PYTHON = os.environ.get("DMPO_TORCH_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="DMPO_TORCH_PYTHON is not set")]


@pytest.mark.parametrize("family", hf.CONFIGS)
def test_exports_in_pytorch(tmp_path, family):
    content, lora = hf.CONFIGS[family], LoraConfig(rank=4, alpha=6.0)
    source = hf.write_checkpoint(tmp_path / "source", content, hf.random_tensors(content, seed=8))
    config, params = load_pretrained(source)
    fresh = init_adapters(jax.random.key(0), lora, config)
    adapters = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), fresh)
    folder = tmp_path / "out"
    export_checkpoint(params, config, special_ids(content, ""), folder)
    write_adapter(adapters, lora, config, str(source), folder / "adapter")
    tokens = np.random.default_rng(0).integers(0, 240, (4, 48))
    np.save(folder / "tokens.npy", tokens)
    subprocess.run([PYTHON, str(Path(__file__).with_name("torch_side.py")), str(folder)], check=True)

    torch = np.load(folder / "torch.npz")
    run = jax.jit(logits, static_argnums=2)
    ours = np.asarray(run(params, tokens, config))
    beside = np.asarray(run(attach(params, adapters, lora), tokens, config))
    merged = np.asarray(run(merge(attach(params, adapters, lora), config), tokens, config))
    rough_config, rough_params = load_pretrained(source, dtype="bfloat16")
    rough = np.asarray(run(rough_params, tokens, rough_config))
    error = np.abs(rough - torch["fp32"]).mean()
    allowed = np.abs(torch["bf16"] - torch["fp32"]).mean()
    print(
        f"\n{family}: fp32 {np.abs(ours - torch['fp32']).max():.1e}, adapter {np.abs(beside - torch['beside']).max():.1e}, "
        f"merged {np.abs(merged - torch['merged']).max():.1e}, bf16 {error:.4f} against torch's {allowed:.4f}: "
        f"ratio {error / allowed:.2f}, argmax {(rough.argmax(-1) == torch['bf16'].argmax(-1)).mean():.3f}"
    )
    np.testing.assert_allclose(ours, torch["fp32"], atol=5e-5)
    assert np.array_equal(ours.argmax(-1), torch["fp32"].argmax(-1))
    np.testing.assert_allclose(beside, torch["beside"], atol=1e-4)
    np.testing.assert_allclose(merged, torch["merged"], atol=1e-4)
    assert error / allowed < 1.3
    assert (rough.argmax(-1) == torch["bf16"].argmax(-1)).mean() > 0.97
