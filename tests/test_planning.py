"""Planning without the hardware: loops and collectives counted from compiled text, and the programs that training runs."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tpu_compiler import needs_libtpu

from dmpo_jax import cli
from dmpo_jax.config import resolve
from dmpo_jax.diffusion.elbo import token_log_probs
from dmpo_jax.errors import UserError
from dmpo_jax.model.parameters import ModelConfig
from dmpo_jax.parallel.mesh import make_mesh
from dmpo_jax.planning.chips import TPUS, check_compiler, parse_topology
from dmpo_jax.planning.hlo import parse, trip_count, walk
from dmpo_jax.planning.plan import as_text, suggestions
from dmpo_jax.planning.programs import PHASES, abstract_batch, abstract_state, denoising_steps, lowered
from dmpo_jax.training.data import Batches, encode, place
from dmpo_jax.training.flops import phase_flops
from dmpo_jax.training.setup import make_setup
from dmpo_jax.training.state import fresh_state

SMALL = {
    "run": {"cycles": 2},
    "model": {"d_model": 32, "n_layers": 2, "n_heads": 2, "d_mlp": 64},
    "task": {"train_size": 16},
    "rollout": {"prompts": 8, "group": 2, "completion_length": 20, "prompt_buckets": [24]},
    "sampler": {"steps": 10, "block_length": 10, "temperature": 1.0},
    "objective": {"name": "dmpo", "updates": 3, "masks": 2, "weight_masks": 2},
}


def small(**sections):
    return make_setup(resolve({k: {**SMALL.get(k, {}), **sections.get(k, {})} for k in {**SMALL, **sections}}))


def test_loops_count_as_often_as_they_run():
    """On 8 devices: 6 layers of gathered weights in a scan, then a loop that the data end, taken to run 5 times."""
    mesh = make_mesh((1, 8, 1))

    def network(w, x):
        def layer(h, w):
            return jnp.einsum("bd,df->bf", h, jax.reshard(w, PartitionSpec())), None

        h, _ = jax.lax.scan(layer, x, w)

        def inner(h):
            return jax.lax.while_loop(lambda h: jnp.any(h > 1e-3), lambda h: h @ jnp.ones((64, 64)) * 1e-3, h)

        return jax.shard_map(inner, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec("fsdp"))(h)

    with jax.set_mesh(mesh):
        w = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "fsdp")))
        x = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
        text = jax.jit(network).lower(w, x).compile().as_text()
    walked = walk(text, lambda place: 5)
    assert walked.total_flops == (6 + 5) * 2 * 4 * 64 * 64
    assert [(c.kind, c.loop, c.count, c.bytes) for c in walked.collectives] == [
        ("all-gather", True, 6, 6 * 64 * 64 * 4)
    ]
    assert walked.traffic["other"] == (6 + 5) * 4 * (4 * 64 + 64 * 64 + 4 * 64)


TPU_TEXT = """HloModule jit_f

%fused (p0: bf16[4,256,8,128], p1: bf16[4,256,8,128]) -> bf16[4,1,256,256] {
  %p0 = bf16[4,256,8,128]{1,3,2,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[4,256,8,128]{1,3,2,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %conv = bf16[4,1,256,256]{3,2,1,0:T(8,128)(2,1)} convolution(%p0, %p1), \
window={size=4x8 stride=3x7 pad=0_0x0_-49 lhs_dilate=4x8}, \
dim_labels=0b1f_0o1i->01bf, metadata={op_name="jit(f)/update/dot"}
}

%cond (c: (s32[], bf16[4,256,8,128])) -> pred[] {
  %c = (s32[]{:T(128)}, bf16[4,256,8,128]{1,3,2,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %limit = s32[]{:T(128)} constant(9)
  ROOT %less = pred[]{:T(512)} fusion(%i, %limit), kind=kLoop, calls=%compared
}

%compared (a: s32[], b: s32[]) -> pred[] {
  %a = s32[]{:T(128)} parameter(0)
  %b = s32[]{:T(128)} parameter(1)
  ROOT %lt = pred[]{:T(512)} compare(%a, %b), direction=LT
}

%body (c.1: (s32[], bf16[4,256,8,128])) -> (s32[], bf16[4,256,8,128]) {
  %c.1 = (s32[]{:T(128)}, bf16[4,256,8,128]{1,3,2,0}) parameter(0)
  %x = bf16[4,256,8,128]{1,3,2,0} get-tuple-element(%c.1), index=1
  %y = bf16[4,1,256,256]{3,2,1,0} fusion(%x, %x), kind=kOutput, calls=%fused
  %ag = (bf16[8,16]{1,0}, bf16[64,16]{1,0}) all-gather-start(%z), channel_id=3, dimensions={0}
  %ag2 = (bf16[8,16]{1,0}, bf16[64,16]{1,0}) all-gather-start(%z), channel_id=3, dimensions={0}
  ROOT %t = (s32[]{:T(128)}, /*index=1*/bf16[4,256,8,128]{1,3,2,0}) tuple(%i, %x)
}

ENTRY %main (x.1: bf16[4,256,8,128]) -> bf16[4,256,8,128] {
  %start = (s32[]{:T(128)}, bf16[4,256,8,128]{1,3,2,0}) tuple(%zero, %x.1)
  %loop = (s32[]{:T(128)}, bf16[4,256,8,128]{1,3,2,0}) while(%start), condition=%cond, body=%body, \
metadata={op_name="jit(f)/update/while"}
  ROOT %out = bf16[4,256,8,128]{1,3,2,0} get-tuple-element(%loop), index=1
}
"""


def test_a_tpu_programs_products_and_pieces():
    """A batched product written as a convolution, of which 4 x 1 pairs of positions meet; an exchange in two pieces, which the
    compiler put into a loop of the update without a place of its own."""
    computations, entry = parse(TPU_TEXT)
    assert trip_count(computations, computations[entry]["loop"]) == 9
    walked = walk(TPU_TEXT, lambda place: 1e9, PHASES)
    assert walked.flops["update"] == 9 * 2 * 4 * 256 * 256 * 128 and walked.flops["sample"] == 0
    gathered = ("all-gather", "update", True, 9, 9 * 64 * 16 * 2)
    assert [dataclasses.astuple(c) for c in walked.collectives] == [gathered]


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_planned_programs_are_those_that_run(shape):
    setup, mesh = small(), make_mesh(shape)
    with jax.set_mesh(mesh):
        batch = abstract_batch(setup, mesh)
        planned = abstract_state(setup, batch, mesh)
        examples = setup.task.examples(setup.config.task, "train")
        data = encode(examples, setup.tokenizer, 20, (24,))
        real = fresh_state(setup, mesh), place(Batches(data, 8, 0, (24,))[0], mesh)
    for a, b in zip(jax.tree.leaves((planned, batch)), jax.tree.leaves(real), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) and a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize("name", ["dmpo", "denoise"])
def test_flops_walked_are_those_of_the_formula(name):
    """Of a whole cycle on one device; the walk sees what the formula leaves out, small here: products of a one-hot."""
    if name == "dmpo":
        setup = small()
    else:
        sections = SMALL | {"objective": {"name": name, "masks": 2}, "rollout": SMALL["rollout"] | {"group": 1}}
        setup = make_setup(resolve(sections))
    programs = lowered(setup, make_mesh((1, 1, 1), jax.devices()[:1]))
    assert ("rollout" in programs) == (name == "dmpo")
    alone = lowered(setup, make_mesh((1, 1, 1), jax.devices()[:1]), cycle_only=True)
    assert {key: program.as_text() for key, program in alone.items()} == {"cycle": programs["cycle"].as_text()}
    steps = denoising_steps(setup)
    assert steps == 5
    walked = walk(programs["cycle"].compile().as_text(), lambda place: steps, PHASES)
    wanted = phase_flops(setup, 24)
    assert walked.flops["sample"] == pytest.approx(wanted["rollout"], rel=0.01)
    assert walked.flops["prepare"] == pytest.approx(wanted["prepare"], rel=0.01)
    assert walked.flops["update"] == pytest.approx(wanted["update"], rel=0.05)


def test_a_rollout_exchanges_nothing_in_its_loops_on_data_and_model_shards():
    for shape in ((8, 1, 1), (2, 2, 2)):
        text = lowered(small(), make_mesh(shape))["rollout"].compile().as_text()
        found = [c for c in walk(text, lambda place: 5, PHASES).collectives if c.loop]
        assert not found, (shape, found)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5p", "expected a name like"),
        ("v5litepod-8", "expected a name like"),
        ("v5p:2x2", "3 axes"),
        ("v5e:32x32", "at most 16"),
        ("v5e:0x4", "1 or more"),
        ("h100:16", "at most 8 GPUs"),
        ("a" * 10_000, "expected a name like"),
    ],
)
def test_names_that_are_no_topology(name, words):
    with pytest.raises(UserError, match=words) as error:
        parse_topology(name)
    assert "--topology" in str(error.value) and len(str(error.value)) < 300


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    for name, extra in (("v5e:2x4", "plan"), ("h100:8", "plan-gpu")):
        with pytest.raises(UserError, match=rf"pip install 'dmpo_jax\[{extra}\]'"):
            check_compiler(parse_topology(name))


def test_advice_where_it_does_not_fit():
    config = resolve(SMALL | {"lora": {"rank": 4}, "model": SMALL["model"] | {"base": "bfloat16"}})
    cycle = {"fits": False, "peak": 2e10, "compile_s": 1.0, "error": "RESOURCE_EXHAUSTED"}
    found = {
        "topology": "v5e:2x4", "devices": 8, "mesh": {"data": 4, "fsdp": 1, "model": 2}, "effort": "full", "parameters": 9,
        "memory_limit": TPUS["v5e"].memory, "programs": {"cycle": cycle}, "analytic_flops": {},
    }  # fmt: skip
    advice = found["suggestions"] = suggestions(config, found)
    for key in (
        "model.remat",
        "rollout.accumulation = 2",
        "model.rows_at_once",
        'model.base = "int8"',
        "mesh.fsdp = 4",
    ):
        assert any(key in line for line in advice), key
    text = as_text(found)
    assert "NO" in text and "-3.09" in text and all(line in text for line in advice)
    cycle["fits"] = True
    assert suggestions(config, found) == []


@pytest.mark.slow
@needs_libtpu
def test_llada_8b_is_planned_for_a_pod_that_is_not_here(tmp_path, capsys):
    out = tmp_path / "plan.json"
    arguments = ["plan", "configs/llada_8b.toml", "--quick", "--topology", "v5p:2x2x1", "--out", str(out)]
    assert cli.main([*arguments, "--set", "mesh.data=1", "--set", "mesh.fsdp=4"]) == 0
    print(capsys.readouterr().out)
    (found,) = json.loads(out.read_text())
    assert found["parameters"] == 8_015_581_184 and all(p["fits"] for p in found["programs"].values())
    cycle = found["programs"]["cycle"]
    assert not [c for c in cycle["collectives"] if c["phase"] == "sample" and c["in_loop"]]
    assert cycle["flops"]["sample"] == pytest.approx(found["analytic_flops"]["rollout"], rel=0.01)


@pytest.mark.parametrize("gradient", [False, True])
def test_the_head_is_gathered_once_not_in_every_chunk(gradient):
    """Log-probabilities of 8 rows x 12 positions, 3 at a time, under a head of 32 x 96 numbers split over 8 devices."""
    mesh = make_mesh((1, 8, 1))
    config = ModelConfig(vocab_size=96, d_model=32, n_layers=1, n_heads=2, d_mlp=8)
    score = lambda head, hidden, targets: jnp.sum(  # noqa: E731
        token_log_probs({"head": head}, hidden, targets, config, chunk=3)
    )
    with jax.set_mesh(mesh):
        of = lambda shape, dtype, *axes: jax.ShapeDtypeStruct(  # noqa: E731
            shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )
        arguments = (
            of((32, 96), jnp.float32, "fsdp"),
            of((8, 1, 12, 32), jnp.float32, ("data", "fsdp")),
            of((8, 1, 12), jnp.int32, ("data", "fsdp")),
        )
        text = jax.jit(jax.grad(score) if gradient else score).lower(*arguments).compile().as_text()
    large = [c for c in walk(text, lambda place: 1).collectives if c.bytes / c.count >= 32 * 96 * 4 / 8]
    assert large and not any(c.loop for c in large)
    assert [(c.count, c.bytes) for c in large if c.kind == "all-gather"] == [(1, 32 * 96 * 4)]
