"""XLA's attention against NumPy float64, the kernels against XLA's, which one is taken when, and what is refused."""

import dataclasses
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec
from tpu_compiler import environment, needs_libtpu

from dmpo_jax.errors import UserError
from dmpo_jax.model import attention, cudnn
from dmpo_jax.model.attention import attend
from dmpo_jax.model.denoiser import hidden_states
from dmpo_jax.model.parameters import ModelConfig, init_params
from dmpo_jax.parallel.mesh import AXES, make_mesh, per_shard


def random_inputs(batch=3, heads=4, kv_heads=2, queries=128, keys=256, size=8, dtype=jnp.float32):
    """q, k, v, and lengths from a whole row down to one key."""
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    q, k, v = (make(batch, n, s, size) for n, s in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    return q, k, v, jnp.asarray(np.linspace(keys, 1, batch), jnp.int32)


def by_hand(q, k, v, lengths, blocks=None, visible=None):
    """float64, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for row, head, query in np.ndindex(q.shape[:3]):
        seen = [
            s
            for s in range(k.shape[2])
            if s < lengths[row]
            and (blocks is None or blocks[1][row, s] <= blocks[0][row, query])
            and (visible is None or visible[query % len(visible), s])
        ]
        group = head // (q.shape[1] // k.shape[1])
        scores = k[row, group, seen] @ q[row, head, query] / np.sqrt(q.shape[3])
        weights = np.exp(scores - scores.max())
        out[row, head, query] = weights / weights.sum() @ v[row, group, seen]
    return out


def result_and_gradients(arrays, lengths, **how):
    """The output, and the gradients of a random linear function of it in q, k and v."""
    weight = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape), arrays[0].dtype)

    def loss(*arrays):
        out = attend(*arrays, lengths, **how)
        return jnp.sum((out * weight).astype(jnp.float32)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return out, *grads


def assert_close(found, wanted):
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=1e-5 if i == 0 else 1e-4, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "blocks", "one row", "all rows"])
def test_xla_equals_float64_by_hand(kv_heads, mask):
    *arrays, lengths = random_inputs(kv_heads=kv_heads, queries=5, keys=9)
    rng = np.random.default_rng(2)
    blocks = (rng.integers(0, 3, (3, 5)), rng.integers(0, 3, (3, 9)).astype(np.int32)) if mask == "blocks" else None
    visible = {"one row": rng.random((1, 9)) < 0.5, "all rows": rng.random((5, 9)) < 0.5}.get(mask)
    if blocks is not None:
        blocks[1][:, 0] = 0  # every query sees something
    if visible is not None:
        visible[:, 0] = True
    found = attend(*arrays, lengths, blocks, visible, implementation="xla")
    np.testing.assert_allclose(found, by_hand(*arrays, lengths, blocks, visible), atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys"),
    [(2, 2, 256, 256), (4, 2, 128, 384), (4, 1, 512, 640), (2, 1, 40, 300)],  # the last one fills up no tile
)
def test_splash_equals_xla(heads, kv_heads, queries, keys):
    *arrays, lengths = random_inputs(heads=heads, kv_heads=kv_heads, queries=queries, keys=keys)
    wanted = result_and_gradients(arrays, lengths, implementation="xla")
    assert_close(result_and_gradients(arrays, lengths, implementation="splash"), wanted)


def test_splash_hides_what_is_hidden_from_every_query():
    *arrays, lengths = random_inputs(queries=100, keys=200)
    visible = np.random.default_rng(2).random((1, 200)) < 0.5
    visible[:, 0] = True
    wanted = result_and_gradients(arrays, lengths, implementation="xla", visible=visible)
    assert_close(result_and_gradients(arrays, lengths, implementation="splash", visible=visible), wanted)


def test_splash_in_bf16_differs_by_roundings():
    *arrays, lengths = random_inputs(size=32)
    wanted = attend(*arrays, lengths, implementation="xla")
    rounded = [x.astype(jnp.bfloat16) for x in arrays]
    found = attend(*rounded, lengths, implementation="splash")
    assert found.dtype == jnp.bfloat16
    assert 1e-4 < float(jnp.max(jnp.abs(found - wanted))) < 0.05


@pytest.mark.parametrize("implementation", ["xla", "splash"])
def test_what_lies_behind_a_row_has_exactly_no_effect(implementation):
    q, k, v, _ = random_inputs(batch=2)
    lengths = jnp.array([130, 7])
    padding = (jnp.arange(256) >= lengths[:, None])[:, None, :, None]
    first = result_and_gradients([q, k, v], lengths, implementation=implementation)
    other = [q, jnp.where(padding, 50.0, k), jnp.where(padding, -9.0, v)]
    second = result_and_gradients(other, lengths, implementation=implementation)
    for a, b in zip(first, second, strict=True):
        assert np.array_equal(a, b)
    assert not np.any(np.asarray(first[2] * padding)) and not np.any(np.asarray(first[3] * padding))


@pytest.mark.parametrize(("heads", "kv_heads", "batch"), [(4, 2, 4), (4, 1, 4), (3, 1, 8), (4, 4, 3)])
def test_splash_on_a_mesh_equals_xla_on_one_device(heads, kv_heads, batch):
    """Also where key heads, heads or rows do not divide among the devices."""
    *arrays, lengths = random_inputs(batch=batch, heads=heads, kv_heads=kv_heads)
    wanted = result_and_gradients(arrays, lengths, implementation="xla")
    mesh = make_mesh((2, 2, 2))
    with jax.set_mesh(mesh):
        *placed, there = (
            jax.device_put(x, jax.sharding.NamedSharding(mesh, PartitionSpec())) for x in (*arrays, lengths)
        )
        found = result_and_gradients(placed, there, implementation="splash")
        sharding = jax.eval_shape(lambda *x: attend(*x, there, implementation="splash"), *placed).sharding.spec
    assert_close(found, wanted)
    rows, over_heads = ("data", "fsdp") if batch % 4 == 0 else None, "model" if heads % 2 == 0 else None
    assert sharding == PartitionSpec(rows, over_heads, None, None)


def test_splash_inside_a_shard():
    *arrays, lengths = random_inputs(batch=4)
    wanted = attend(*arrays, lengths, implementation="xla")
    mesh = make_mesh((2, 2, 2))
    with jax.set_mesh(mesh):
        rows = jax.device_put((*arrays, lengths), jax.sharding.NamedSharding(mesh, PartitionSpec()))
        shard = lambda _, rows: attend(*rows, implementation="splash")  # noqa: E731
        found = jax.jit(lambda rows: per_shard(shard, (), rows))(rows)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("shape", [None, (2, 2, 2)])
def test_a_model_with_splash_learns_as_one_without(shape):
    """Scan over recomputed layers, with grouped key heads."""
    config = ModelConfig(
        vocab_size=7, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_mlp=24, remat="full", attention="xla"
    )
    params = init_params(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (4, 40), 0, 7)
    lengths = jnp.array([40, 17, 3, 31])
    positions = jnp.broadcast_to(jnp.arange(40), (4, 40))

    def loss(params, config):
        hidden = hidden_states(params, tokens, positions, lengths, config)
        live = positions < lengths[:, None]
        return jnp.sum(jnp.where(live[..., None], jnp.sin(hidden), 0))

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    wanted = gradient(params, config)
    config = dataclasses.replace(config, attention="splash")
    if shape is None:
        found = gradient(params, config)
    else:
        mesh = make_mesh(shape)
        with jax.set_mesh(mesh):
            whole = jax.sharding.NamedSharding(mesh, PartitionSpec())
            tokens, lengths, positions, params = jax.device_put((tokens, lengths, positions, params), whole)
            found = gradient(params, config)
    assert jnp.abs(wanted[0]) > 1
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-4)


def abstract_mesh(platform, kinds=(AxisType.Explicit,) * 3):
    device = AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    return AbstractMesh((2, 1, 2), AXES, kinds, abstract_device=device)


def traced(mesh, queries=2048, keys=2048, size=64, dtype=jnp.bfloat16, how="auto", blocks=False, visible=0):
    """The text of a program that is traced and not run."""
    like = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    arrays = [like((2, 4, n, size), dtype) for n in (queries, keys, keys)]
    lengths = like((2,), jnp.int32)
    numbers = (like((2, queries), jnp.int32), like((2, keys), jnp.int32)) if blocks else None
    rows = like((visible, keys), bool) if visible else None
    with jax.sharding.use_abstract_mesh(mesh):
        return str(jax.make_jaxpr(lambda *x: attend(*x, how))(*arrays, lengths, numbers, rows))


def kernel_of(text):
    return "splash" if "splash_mha_fwd" in text else "xla"


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ({}, "splash"),
        ({"queries": 128, "keys": 2100}, "splash"),
        ({"visible": 1}, "splash"),
        ({"keys": 2047}, "xla"),
        ({"queries": 127}, "xla"),
        ({"dtype": jnp.float32}, "xla"),
        ({"blocks": True}, "xla"),
        ({"visible": 2048}, "xla"),
        ({"how": "xla"}, "xla"),
    ],
)
def test_auto_takes_splash_where_it_serves_and_matters(case, wanted):
    assert kernel_of(traced(abstract_mesh("tpu"), **case)) == wanted
    assert kernel_of(traced(abstract_mesh("cpu"), **case)) == "xla"
    assert kernel_of(traced(abstract_mesh("gpu"), **case)) == "xla"  # this process has no cuDNN to ask


def test_auto_without_a_mesh_follows_the_default_device():
    none = AbstractMesh((), ())
    assert kernel_of(traced(none)) == "xla"
    with jax.default_device("cpu"):
        assert kernel_of(traced(none)) == "xla"


def test_splash_lowers_for_tpu_forward_and_backward():
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    arrays = like(2, 4, 130, 128), like(2, 2, 2304, 128), like(2, 2, 2304, 128), jax.ShapeDtypeStruct((2,), jnp.int32)
    device = AbstractDevice(device_kind="any", num_cores=1, platform="tpu")
    loss = lambda *x: jnp.sum(attend(*x).astype(jnp.float32))  # noqa: E731
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((1, 1, 1), AXES, (AxisType.Explicit,) * 3, abstract_device=device)
    ):
        text = jax.export.export(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), platforms=["tpu"])(*arrays).mlir_module()
    assert text.count("tpu_custom_call") == 3  # forward, and backward for queries and for keys


@pytest.fixture
def cuda(monkeypatch):
    """As if this process had a Hopper GPU; returns the device."""
    device = types.SimpleNamespace(compute_capability="9.0")
    backend = types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    monkeypatch.setattr(jax.extend.backend, "get_backend", lambda: backend)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    monkeypatch.setattr(attention, "_platform", lambda: "gpu")
    return device


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cudnn_gets_lengths_and_no_mask(cuda, monkeypatch, kv_heads):
    original, calls = jax.nn.dot_product_attention, []

    def instead(*args, implementation, **kwargs):
        calls.append((implementation, [x.shape for x in args], sorted(kwargs)))
        return original(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)
    *arrays, lengths = random_inputs(kv_heads=kv_heads, queries=40, keys=60, dtype=jnp.bfloat16)
    found = attend(*arrays, lengths, implementation="cudnn")
    assert calls == [("cudnn", [(3, 40, 4, 8), *[(3, 60, kv_heads, 8)] * 2], ["key_value_seq_lengths"])]
    wanted = attend(*arrays, lengths, implementation="xla")
    assert found.dtype == jnp.bfloat16 and found.shape == wanted.shape
    np.testing.assert_allclose(found.astype(jnp.float32), wanted.astype(jnp.float32), atol=0.03)


def test_cudnn_lowers_for_cuda_forward_and_backward(cuda, monkeypatch):
    """JAX's own tracing and lowering, told that cuDNN is there; what cuDNN makes of it needs a GPU."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    loss = lambda *x: jnp.sum(attend(*x).astype(jnp.float32))  # noqa: E731
    mesh = make_mesh((2, 2, 2))
    whole = jax.sharding.NamedSharding(mesh, PartitionSpec())
    like = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=whole)  # noqa: E731
    arrays = like(8, 4, 130, 128), like(8, 2, 2304, 128), like(8, 2, 2304, 128), like(8, dtype=jnp.int32)
    names = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    with jax.set_mesh(mesh):
        text = jax.export.export(
            jax.jit(jax.grad(loss, argnums=(0, 1, 2))),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in names],
        )(*arrays).mlir_module()
    assert [len(re.findall("@" + re.escape(name) + r"\b", text)) for name in names] == [1, 1]
    assert "PADDING" in text and "x130x2304x" not in text  # lengths; neither a mask nor scores


@pytest.mark.parametrize(
    ("case", "capability", "taken"),
    [
        ({}, "9.0", True),
        ({}, "8.0", True),
        ({}, "7.5", False),
        ({"size": 256}, "9.0", True),
        ({"size": 256}, "8.9", False),
        ({"size": 20}, "9.0", False),
        ({"dtype": jnp.float32}, "9.0", False),
        ({"visible": 1}, "9.0", False),
        ({"blocks": True}, "9.0", False),
        ({"keys": 1024}, "9.0", False),
    ],
)
def test_auto_takes_cudnn_where_it_serves_and_matters(cuda, monkeypatch, case, capability, taken):
    cuda.compute_capability = capability
    calls = []
    monkeypatch.setattr(cudnn, "attention", lambda q, k, v, lengths: calls.append(q.shape) or q)
    traced(abstract_mesh("gpu"), **case)
    assert bool(calls) == taken


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention": "flash"}, 'attention = "flash": expected one of auto, xla, splash, cudnn'),
        ({"attention": "splash", "block_size": 4}, "splash.*model.block_size = 4"),
        ({"attention": "cudnn", "dtype": "bfloat16", "block_size": 4}, "cudnn.*model.block_size = 4"),
        ({"attention": "cudnn"}, 'cudnn.*model.dtype = "bfloat16"'),
        ({"attention": "cudnn", "dtype": "bfloat16", "head_dim": 20}, "cudnn.*multiple of 8.*found 20"),
        ({"attention": "cudnn", "dtype": "bfloat16", "head_dim": 264}, "cudnn.*at most 256, found 264"),
    ],
)
def test_settings_that_no_kernel_serves_are_refused(change, words):
    with pytest.raises(UserError, match=words) as error:
        ModelConfig(**change).validate()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("how", "platform", "case", "words"),
    [
        ("splash", "cpu", {"blocks": True}, 'splash.*block_size.*use "auto" or "xla"'),
        ("splash", "tpu", {"visible": 2048}, "splash.*hides some"),
        ("splash", "gpu", {}, "splash.*for TPU.*for gpu"),
        ("cudnn", "cpu", {}, "cudnn.*NVIDIA.*for cpu"),
        ("cudnn", "tpu", {}, "cudnn.*NVIDIA.*for tpu"),
        ("cudnn", "gpu", {}, "cudnn.*this process has none"),
        ("cudnn", "gpu", {"visible": 1}, "cudnn.*hides some"),
    ],
)
def test_a_kernel_asked_for_by_name_that_cannot_serve_is_refused(how, platform, case, words):
    with pytest.raises(UserError, match=words):
        traced(abstract_mesh(platform), how=how, **case)


@pytest.mark.parametrize(
    ("capability", "case", "words"),
    [
        ("7.5", {}, "8.0 or later, found 7.5"),
        ("8.0", {"size": 136}, "at most 128 on this GPU, found 136"),
        ("9.0", {"dtype": jnp.float32}, 'model.dtype = "bfloat16", found float32'),
    ],
)
def test_cudnn_is_refused_for_what_the_gpu_lacks(cuda, capability, case, words):
    cuda.compute_capability = capability
    with pytest.raises(UserError, match=words):
        traced(abstract_mesh("gpu"), how="cudnn", **case)


def test_no_kernel_on_a_mesh_with_automatic_axes():
    mesh = abstract_mesh("tpu", (AxisType.Auto,) * 3)
    assert kernel_of(traced(mesh)) == "xla"
    with pytest.raises(UserError, match=r"splash.*Auto"):
        traced(mesh, how="splash")


PROGRAM = r"""
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from dmpo_jax.model.attention import attend
from dmpo_jax.parallel.mesh import ROWS, make_mesh

devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices
rows = len(devices)
mesh = make_mesh((1, rows // 2, 2), devices)
place = lambda *parts: NamedSharding(mesh, PartitionSpec(*parts))
with jax.set_mesh(mesh):
    heads = lambda n: jax.ShapeDtypeStruct((rows, n, 2100, 128), jnp.bfloat16, sharding=place(ROWS, "model"))
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=place(ROWS))
    loss = lambda *x: jnp.sum(attend(*x).astype(jnp.float32))
    lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(heads(8), heads(4), heads(4), lengths)
    text = lowered.compile({"exec_time_optimization_effort": -1.0}).as_text()
print(text.count('custom_call_target="tpu_custom_call"'))
"""


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x1"])
def test_auto_builds_the_kernel_for_tpu(topology):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, topology], env=environment(), text=True, capture_output=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-1] == "3"  # forward, and backward for queries and for keys
