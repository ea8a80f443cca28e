"""The decoding program of LLaDA-8B, compiled for TPU chips that are not here: it builds, it fits, shards stay apart.

Needs libtpu (`pip install libtpu`), which compiles without a TPU; skipped without it. Each compilation runs in a process of
its own, as a compiler that gives up ends the process. `pytest -m slow -s tests/test_tpu_compile.py` prints the table.
"""

import json
import subprocess
import sys

import pytest
from tpu_compiler import environment, needs_libtpu

pytestmark = [pytest.mark.slow, needs_libtpu]

PROGRAM = r"""
import json, re, sys, time
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.sampler import SamplerConfig, sample
from dmpo_jax.model.parameters import ModelConfig, count_params, init_params, shardings
from dmpo_jax.model.quantize import store_tree, stored_specs
from dmpo_jax.parallel.mesh import ROWS, make_mesh, per_shard

topology, cache, base = sys.argv[1:]
devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
mesh = make_mesh((len(devices), 1, 1), devices)
config = ModelConfig(
    vocab_size=126464, d_model=4096, n_layers=32, n_heads=32, d_mlp=12288, rope_theta=500000.0, dtype="bfloat16", base=base
)
assert count_params(config) == 8_015_581_184
rows = 8 * len(devices)
sampler = SamplerConfig(steps=128, block_length=32, temperature=0.2, cache=cache)

def decode(params, prompts, key):
    on_shard = lambda whole, local: sample(
        whole[0], local[0], row_keys(whole[1], local[1]),
        length=256, mask_id=126336, eos_id=126081, sampler=sampler, config=config,
    )
    return per_shard(on_shard, (params, key), (prompts, jnp.arange(rows, dtype=jnp.int32)))

with jax.set_mesh(mesh):
    place = shardings(stored_specs(config), mesh)
    shapes = jax.eval_shape(lambda: store_tree(init_params(jax.random.key(0), config), config))
    params = jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, place)
    by_rows = NamedSharding(mesh, PartitionSpec(ROWS))
    of_rows = lambda *shape: jax.ShapeDtypeStruct((rows, *shape), jnp.int32, sharding=by_rows)
    prompts = Prompts(of_rows(256), of_rows())
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    lowered = jax.jit(decode).lower(params, prompts, key)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
memory, text = compiled.memory_analysis(), compiled.as_text()
print(json.dumps({
    "compile_s": seconds,
    "arguments": memory.argument_size_in_bytes,
    "temporary": memory.temp_size_in_bytes,
    "peak": memory.peak_memory_in_bytes,
    "collectives": len(re.findall(r" (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)[-a-z]*\(", text)),
}))
"""
# High-bandwidth memory that the compiler grants one device, in bytes.
HBM = {"v5p:2x2x1": 95.74 * 2**30, "v6e:2x4": 31.25 * 2**30, "v5e:2x4": 15.75 * 2**30}


@pytest.mark.parametrize(
    ("topology", "cache", "base"),
    [
        ("v5p:2x2x1", "prefix", "bfloat16"),
        ("v6e:2x4", "prefix", "bfloat16"),
        ("v5p:2x2x1", "dual", "bfloat16"),
        ("v6e:2x4", "dual", "bfloat16"),
        ("v5e:2x4", "dual", "int8"),
        pytest.param(
            *("v5e:2x4", "prefix", "int8"),
            marks=pytest.mark.xfail(strict=True, reason="its temporaries alone need 15.81 GiB of 15.75"),
        ),
    ],
)
def test_llada_8b_decodes_eight_sequences_a_chip(topology, cache, base):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, topology, cache, base],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=1500,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    print(f"\n{topology} {base} {cache}: {found}")
    assert found["peak"] < HBM[topology]
    assert found["collectives"] == 0
