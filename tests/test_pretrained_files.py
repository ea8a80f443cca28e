"""Safetensors in and out: every name once, nothing accepted that does not fit, round trips exact."""

import dataclasses
import json
import struct

import hf_checkpoints as hf
import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import errors

from dmpo_jax import load_pretrained
from dmpo_jax.errors import UserError
from dmpo_jax.model import pretrained
from dmpo_jax.model.checkpoint_folder import locate, model_of, open_folder, stored_shape, tensor_names, write_folder
from dmpo_jax.model.families import special_ids
from dmpo_jax.model.parameters import param_shardings, shardings
from dmpo_jax.model.pretrained import DTYPES, export_checkpoint, import_checkpoint, load_params, stored_tensors
from dmpo_jax.model.quantize import store_tree, stored_specs
from dmpo_jax.model.safetensors import read_header
from dmpo_jax.parallel.mesh import make_mesh


def checkpoint(folder, family="llada", **options):
    content = hf.CONFIGS[family]
    tensors = hf.random_tensors(content, seed=2)
    return hf.write_checkpoint(folder, content, tensors, **options), tensors


def values(folder):
    """Name -> array of every tensor in a folder."""
    return {
        name: entry.read() for path in sorted(folder.glob("*.safetensors")) for name, entry in read_header(path).items()
    }


def same_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_a_file_by_hand(tmp_path):
    header = {"b": {"dtype": "BF16", "shape": [2], "data_offsets": [8, 12]}, "__metadata__": {"format": "pt"},
              "a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}  # fmt: skip
    text = json.dumps(header).encode()
    data = struct.pack("<2f", 1.5, -2.0) + struct.pack("<2H", 0x3F80, 0xC000)  # bf16 1.0 and -2.0
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    entries = read_header(tmp_path / "x.safetensors")
    assert entries["a"].read().tolist() == [[1.5, -2.0]]
    assert entries["b"].read().astype(np.float32).tolist() == [1.0, -2.0]


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([], "not an object"),
        ({"a": 3}, "bad entry"),
        ({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, "bad entry"),
        ({"a": {**GOOD, "data_offsets": [0, 4]}}, "bad offsets"),
        ({"a": {**GOOD, "shape": [-2]}}, "bad offsets"),
        ({"a": {**GOOD, "dtype": "F8_E4M3"}}, "dtype 'F8_E4M3'"),
        ({"a": {**GOOD, "dtype": "I64", "shape": [1]}}, "dtype 'I64'"),
        ({"a": GOOD, "b": GOOD}, "overlap"),
        ({"a": {**GOOD, "data_offsets": [8, 16]}}, "holes"),
        ({"a": GOOD}, "in the file"),
    ],
)
def test_malformed_files_are_refused(tmp_path, header, words):
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 24)
    with pytest.raises(UserError, match=words):
        read_header(path)


@pytest.mark.parametrize(
    "raw", [b"", b"\1\0", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"\xff{", b"\0" * 8]
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, raw):
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(UserError, match="not a valid safetensors file"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("family", hf.CONFIGS)
def test_every_name_is_consumed_once_with_its_shape(tmp_path, family):
    folder, tensors = checkpoint(tmp_path / "m", family)
    config, _ = model_of(folder)
    wanted = [(name, stored_shape(spec, layer is not None)) for _, layer, name, spec in tensor_names(config)]
    assert len(wanted) == len(dict(wanted)) == len(tensors)
    assert dict(wanted) == {name: value.shape for name, value in tensors.items()}
    assert open_folder(folder, config).keys() == tensors.keys()


@pytest.mark.parametrize("family", hf.CONFIGS)
def test_export_then_import_is_exact(tmp_path, family):
    folder, tensors = checkpoint(tmp_path / "m", family, shards=2)
    config, params = load_pretrained(folder)
    ids = special_ids(hf.CONFIGS[family], "")
    export_checkpoint(params, config, ids, tmp_path / "out")
    found = values(tmp_path / "out")
    assert found.keys() == tensors.keys() and all(np.array_equal(found[n], tensors[n]) for n in tensors)
    again = load_pretrained(tmp_path / "out")
    assert again[0] == config and same_trees(again[1], params)

    # What bf16 stores goes through fp32 and back without change.
    low, _ = checkpoint(tmp_path / "low", family, dtype="bfloat16")
    config, params = load_pretrained(low)
    export_checkpoint(params, config, ids, tmp_path / "low_out", "bfloat16")
    before, after = values(low), values(tmp_path / "low_out")
    assert all(after[n].dtype == ml_dtypes.bfloat16 and np.array_equal(before[n], after[n]) for n in before)


def test_shards_and_their_index(tmp_path):
    folder, tensors = checkpoint(tmp_path / "m")
    config, params = load_pretrained(folder)
    (tmp_path / "out").mkdir()
    dtype = DTYPES["float32"]
    write_folder(tmp_path / "out", hf.LLADA, config, dtype, stored_tensors(params, config, dtype), shard_bytes=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert same_trees(load_pretrained(tmp_path / "out")[1], params)


@pytest.mark.parametrize(
    "base", ["float32", "nf4", *(pytest.param(b, marks=pytest.mark.slow) for b in ("bfloat16", "int8"))]
)
def test_loading_onto_a_mesh_equals_loading_and_then_storing(tmp_path, base):
    folder, _ = checkpoint(tmp_path / "m", "sdar")
    config, plain = load_pretrained(folder)
    stored = dataclasses.replace(config, base=base, dtype="bfloat16")
    wanted = jax.jit(lambda tree: store_tree(tree, stored))(plain)
    mesh = make_mesh((2, 2, 2))
    found = load_params(folder, stored, mesh)
    assert same_trees(jax.device_get(found), jax.device_get(wanted))
    places = shardings(stored_specs(stored), mesh)
    assert all(x.sharding == s for x, s in zip(jax.tree.leaves(found), jax.tree.leaves(places), strict=True))
    assert same_trees(load_params(folder, stored), wanted)


def test_library_call_with_a_mesh(tmp_path):
    folder, _ = checkpoint(tmp_path / "m")
    mesh = make_mesh((1, 4, 2))
    config, params = load_pretrained(folder, mesh=mesh)
    assert jax.tree.map(lambda x: x.sharding, params) == param_shardings(config, mesh)
    with jax.set_mesh(mesh):
        export_checkpoint(params, config, special_ids(hf.LLADA, ""), tmp_path / "out")
    before, after = values(folder), values(tmp_path / "out")
    assert all(np.array_equal(before[n], after[n]) for n in before)
    with pytest.raises(UserError, match="float16"):
        load_pretrained(folder, dtype="float16")


HEAD, NORM = "model.transformer.ff_out.weight", "model.transformer.ln_f.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(HEAD), f"1 missing .first: {HEAD}"),
        (lambda t: t.update({"lm_head.weight": t[HEAD]}), "1 unknown .first: lm_head.weight"),
        (lambda t: t.update({HEAD: t[HEAD].T.copy()}), r"shape \(64, 256\): config.json makes it \(256, 64\)"),
        (lambda t: t.update({NORM: t[NORM].astype(np.int8)}), "has dtype 'I8'"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(tmp_path, change, words):
    tensors = hf.random_tensors(hf.LLADA)
    change(tensors)
    (tmp_path / "config.json").write_text(json.dumps(hf.LLADA))
    hf.write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(UserError, match=words):
        load_pretrained(tmp_path)


def test_tied_models_hold_no_head(tmp_path):
    tensors = hf.random_tensors(hf.LLADA)
    hf.write_checkpoint(tmp_path / "m", {**hf.LLADA, "weight_tying": True}, tensors)
    with pytest.raises(UserError, match=r"1 unknown .*ff_out.weight.*with tied head"):
        load_pretrained(tmp_path / "m")


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf.LLADA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(UserError, match=r"pytorch_model.bin, a pickle.*safe_serialization=True"):
        load_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"no model.safetensors"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("file", "words"),
    [("../m2/model.safetensors", "name of a .safetensors file"), ("/etc/passwd", "name of a"), ("w.bin", "name of a")],
)
def test_an_index_cannot_point_elsewhere(tmp_path, file, words):
    folder, _ = checkpoint(tmp_path / "m", shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][NORM] = file
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=words):
        load_pretrained(folder)


def test_an_index_must_agree_with_its_files(tmp_path):
    folder, tensors = checkpoint(tmp_path / "m", shards=2)
    first = sorted(folder.glob("*.safetensors"))[0]
    content = {name: entry.read() for name, entry in read_header(first).items()}
    hf.write_safetensors(first, {**content, sorted(tensors)[1]: tensors[sorted(tensors)[1]]})  # also in the second
    with pytest.raises(UserError, match="which the index places in"):
        load_pretrained(folder)
    content.pop(sorted(content)[0])
    hf.write_safetensors(first, content)
    with pytest.raises(UserError, match="is not in model-00001"):
        load_pretrained(folder)


@pytest.mark.parametrize("text", ["[1]", "{", "\xff", '{"a":' * 5000])
def test_config_json_must_be_an_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"config.json: (not valid JSON|expected a JSON object)"):
        load_pretrained(tmp_path)


def test_a_run_keeps_to_its_shape(tmp_path):
    folder, _ = checkpoint(tmp_path / "m")
    config, _ = model_of(folder)
    with pytest.raises(UserError, match=r"model.n_layers is 3, but 4 in this run"):
        load_params(folder, dataclasses.replace(config, n_layers=4))


def test_import_copies_what_it_has_checked(tmp_path):
    folder, _ = checkpoint(tmp_path / "m", dtype="bfloat16", shards=3)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    config, dtype = import_checkpoint(str(folder), tmp_path / "out")
    assert (config.family, dtype) == ("llada", "bfloat16")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    before, after = values(folder), values(tmp_path / "out")
    assert before.keys() == after.keys() and all(np.array_equal(before[n], after[n]) for n in before)
    with pytest.raises(UserError, match="is not empty"):
        import_checkpoint(str(folder), tmp_path / "out")


def test_hub_troubles_are_one_line(monkeypatch, tmp_path):
    def fail(kind):
        error = kind.__new__(kind)  # without the HTTP response that most of them are made from
        error.args = ("long\nstory",)

        def download(*_, **__):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    for error, words in (
        (errors.GatedRepoError, "is gated"),
        (errors.RepositoryNotFoundError, "not on the hub"),
        (errors.RevisionNotFoundError, "no revision 'v9'"),
        (errors.LocalEntryNotFoundError, "cannot be reached"),
        (ConnectionError, "cannot be fetched .ConnectionError"),
    ):
        fail(error)
        with pytest.raises(UserError, match=words) as caught:
            locate("owner/name@v9")
        assert "\n" not in str(caught.value)
    for source in ("nowhere", "a/b/c", str(tmp_path / "absent")):
        with pytest.raises(UserError, match="no such folder"):
            locate(source)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / name))
    assert pretrained.locate("owner/name") == tmp_path / "owner" / "name"
