"""What a user can get wrong, command by command: one line on stderr that is safe to print, exit code 2, nothing done."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import hf_checkpoints as hf
import pytest

from dmpo_jax.cli import main
from dmpo_jax.config import resolve
from dmpo_jax.errors import UserError, one_line
from dmpo_jax.model.checkpoint_folder import locate, model_of
from dmpo_jax.model.safetensors import read_header
from dmpo_jax.training import memory

CONFIG = """
[run]
cycles = 2
compilation_cache = ""
[model]
d_model = 16
n_layers = 1
n_heads = 2
d_mlp = 16
[task]
train_size = 16
validation_size = 8
test_size = 8
[rollout]
prompts = 8
group = 1
[sampler]
steps = 5
[objective]
name = "denoise"
[evaluation]
batch = 8
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with c.toml, weights.toml, a checkpoint folder m, a fifo, and a file where a folder may be wanted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CONFIG)
    (tmp_path / "weights.toml").write_text(re.sub(r"\[model\][^\[]*", "", CONFIG))  # for m, which brings its shape
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("precious")
    hf.write_checkpoint(tmp_path / "m", hf.LLADA, hf.random_tensors(hf.LLADA))
    return tmp_path


@pytest.fixture
def refused(here, capsys):
    """Runs a command in this process and gives its one line of complaint."""

    def run(*arguments):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as exit_:
            code = exit_.code
        err = capsys.readouterr().err
        assert code == 2 and err.endswith("\n") and err[:-1].isprintable(), (code, err)
        return err

    return run


def train(*settings):
    return ("train", "c.toml", "--run-dir", "run", *(part for text in settings for part in ("--set", text)))


# (a) Only regular files are opened.


@pytest.mark.parametrize(("path", "kind"), [("fifo", "fifo"), ("/dev/zero", "device"), (".", "directory")])
def test_only_regular_files_are_read(refused, path, kind):
    evaluate = ("eval", "weights.toml", "--model", "m", "--set", "tokenizer.kind=character", "--out", "o.json")
    for line in (
        refused("train", path, "--run-dir", "run"),
        refused(*train(f'task.train_file="{path}"')),
        refused(*train("task.name=countdown", f'task.test_file="{path}"')),
        refused(*evaluate, "--data", path),
        refused("sample", "weights.toml", "--model", "m", "--file", path),
    ):
        assert path in line and f"is a {kind}" in line


def test_extends_may_name_no_fifo(refused, here):
    (here / "leaf.toml").write_text('extends = "fifo"\n')
    assert "fifo: is a fifo" in refused("train", "leaf.toml")


def test_a_configuration_of_unbounded_size_is_not_read(refused, here):
    with (here / "big.toml").open("wb") as file:
        file.truncate(10**12)  # a hole
    assert "big.toml: 1000000000000 bytes" in refused("train", "big.toml")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "model.safetensors.index.json"])
def test_checkpoint_folders_hold_no_fifo(refused, here, name):
    (here / "m" / name).unlink(missing_ok=True)
    os.mkfifo(here / "m" / name)
    assert f"{name}: is a fifo" in refused("import", "m", "--out", "new")
    assert f"{name}: is a fifo" in refused(*train('model.pretrained="m"'))
    with pytest.raises(UserError, match="is a fifo"):
        read_header(here / "m" / name)
    assert not (here / "new").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters_are_no_fifos(refused, here, name):
    from dmpo_jax.model.adapter_folder import read_adapter
    from dmpo_jax.model.lora import LoraConfig

    (here / "a").mkdir()
    (here / "a" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 64.0}')
    (here / "a" / name).unlink(missing_ok=True)
    os.mkfifo(here / "a" / name)
    with pytest.raises(UserError, match=f"{name}: is a fifo"):
        read_adapter(here / "a", LoraConfig(rank=2), model_of(here / "m")[0])


# (b) What is echoed cannot steer a terminal.


def test_one_line_shows_what_cannot_be_printed():
    assert one_line("a\x1b[31mb\nc\r\x00\x9b\u202e\u2028\udc80 ä字") == (
        r"a\x1b[31mb\nc\r\x00\x9b\u202e\u2028\udc80 ä字"
    )
    assert one_line("x" * 10**6).endswith("x") and len(one_line("x" * 10**6)) < 3000


EVIL = "\x1b[2J\n\u202eevil"


def test_control_characters_are_escaped(refused, here):
    toml = json.dumps(EVIL)  # a quoted TOML key or string
    for text in (f"[run]\n{toml} = 1\n", f"[{toml}]\n", f"[run]\nseed = {toml}\n", f"[objective]\nname = {toml}\n"):
        (here / "evil.toml").write_text(text)
        assert r"\x1b[2J\n\u202eevil" in refused("train", "evil.toml")
    for arguments in (
        train(f"run.{EVIL}=1"),
        train(f"{EVIL}=1"),
        train(f"run.seed={EVIL}"),
        train(f"run.start_from={toml}"),
        train(f"task.train_file={toml}"),
        ("train", EVIL),
        ("import", EVIL, "--out", "new"),
        ("report", EVIL),
        ("export", "--run-dir", EVIL, "--out", "new"),
        ("train", "c.toml", f"--{EVIL}"),
        (EVIL,),
    ):
        assert "x1b[2J" in refused(*arguments)


def test_names_of_tensors_are_escaped(refused, here):
    tensors = hf.random_tensors(hf.LLADA)
    hf.write_checkpoint(here / "m", hf.LLADA, {**tensors, EVIL: tensors["model.transformer.ln_f.weight"]})
    assert r"\x1b[2J\n\u202eevil" in refused("import", "m", "--out", "new")


@pytest.mark.parametrize("where", ["run.seed", "run.compilation_cache", "rollout.prompt_buckets", "objective.name"])
def test_numbers_that_python_does_not_spell(refused, where):
    refused(*train(f"{where}=0x1{'0' * 5000}"))
    refused(*train(f"{where}=[0x1{'0' * 5000}]"))


# (c) What cannot fit in memory is refused before anything is placed there.


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["rollout.prompts=80000000"], "rollout.prompts"),
        (["rollout.completion_length=200000", "sampler.steps=0"], "rollout.completion_length"),
        (["evaluation.batch=800000000"], "evaluation.batch"),
        (["objective.masks=200000000"], "masks"),
        (["model.n_layers=10000", "model.d_mlp=4194304"], "model.n_layers"),
        (["model.vocab_size=16000000", "model.d_model=65536"], "vocab_size"),
        (["objective.name=dmpo", "rollout.group=10000000"], "rollout.group"),
        (["lora.rank=1000000000"], "model.n_layers"),
    ],
)
def test_too_much_for_memory(refused, here, settings, words):
    line = refused(*train(*settings))
    assert words in line and "GB" in line and not (here / "run").exists()


def test_other_commands_watch_memory_too(refused, here):
    large = ("--set", "model.n_layers=10000", "--set", "model.d_mlp=4194304")
    assert "GB" in refused("eval", "c.toml", "--run-dir", "run", "--out", "o.json", *large)
    assert "GB" in refused("sample", "c.toml", "--run-dir", "run", "--prompt", "1=", *large)
    assert "GB" in refused("bench", "c.toml", *large)
    assert "GB" in refused("bench", "sample", "c.toml", *large)


def test_memory_by_hand(monkeypatch):
    config = resolve(
        {
            "model": {"vocab_size": 10, "d_model": 8, "n_layers": 3, "n_heads": 2, "d_mlp": 16},
            "rollout": {"prompts": 4, "group": 2, "completion_length": 6},
            "objective": {"masks": 2, "weight_masks": 2},
            "evaluation": {"batch": 4},
        }
    )
    # Embedding and head 2 x 80; three layers of 4 matrices of 64, 3 of 128 and 2 norms of 8; the last norm.
    parameters = 160 + 3 * (4 * 64 + 3 * 128 + 16) + 8
    # An update: 8 rows x 2 masks, the stream of 6 x 8 fp32 kept for 3 layers, one layer's 2 heads of 6 x 6 fp32 scores.
    needed = 20 * parameters + 16 * (3 * 4 * 6 * 8 + 4 * 2 * 36)
    monkeypatch.setattr(memory, "_memory", lambda: needed)
    memory.check_memory(config)
    monkeypatch.setattr(memory, "_memory", lambda: needed - 1)
    with pytest.raises(UserError, match="lower the model's sizes"):
        memory.check_memory(config)
    monkeypatch.setattr(memory, "_memory", lambda: None)  # a backend that does not say
    memory.check_memory(config)


def test_a_prompt_bucket_has_a_sane_width():
    with pytest.raises(UserError, match=r"rollout\.prompt_buckets.*131072"):
        resolve({"rollout": {"prompt_buckets": [10**9]}})


# (d) Settings without effect are refused by name.


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"lora": {"alpha": 8.0}}, "lora.alpha has no effect with lora.rank = 0"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout has no effect"),
        ({"lora": {"targets": ["wq"]}}, "lora.targets has no effect"),
        ({"tokenizer": {"truncation": "left"}}, "tokenizer.truncation.*rollout.prompt_buckets"),
    ],
)
def test_dead_settings(tables, words):
    with pytest.raises(UserError, match=words):
        resolve(tables)


def test_live_settings_pass():
    resolve({"lora": {"rank": 2, "alpha": 8.0, "dropout": 0.1, "targets": ["wq"]}})
    resolve({"tokenizer": {"truncation": "left"}, "rollout": {"prompt_buckets": [8]}})
    resolve({"evaluation": {"every": 40}})


# (e) config.json: the file and the key.

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("family", ["llada", "dream", "sdar"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0, 0, 1e300, 1e-300, 10**400, "1", True, [], {"a": 1}])
@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_numbers_of_a_model(here, family, key, value):
    (here / "m" / "config.json").write_text(json.dumps({**hf.CONFIGS[family], key: value}))
    with pytest.raises(UserError, match=f"m/config.json: {key} = ") as error:
        model_of(here / "m")
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("value", [-1, 256, True, 1.0, "1", [], [250, -1], [250, 256], [250, "x"], [[250]], {}, NAN])
@pytest.mark.parametrize("key", ["mask_token_id", "eos_token_id", "pad_token_id"])
def test_special_ids(here, key, value):
    (here / "m" / "config.json").write_text(json.dumps({**hf.LLADA, key: value}))
    with pytest.raises(UserError, match=f"m/config.json: {key} = "):
        model_of(here / "m")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", "LLaDAModelLM"),
        ("architectures", [3]),
        ("architectures", [["LLaDAModelLM"]]),
        ("architectures", 3),
        ("architectures", {"a": 1}),
        ("model_type", 3),
        ("model_type", ["llada"]),
        ("model_type", {"a": [[["x" * 500] * 50] * 50]}),
        ("n_layers", 10**300),
        ("n_layers", 10_001),  # in no file of ours, and out of the range of model.n_layers
        ("mlp_hidden_size", 2**30),
        ("n_heads", 3),
        ("vocab_size", NAN),
        ("rope_scaling", "x" * 10_000),
        ("dmpo_tokenizer", ["byte"]),
    ],
)
def test_import_and_train_name_file_and_key(refused, here, key, value):
    content = {**hf.LLADA, key: value}
    content.pop("embedding_size")
    (here / "m" / "config.json").write_text(json.dumps(content))
    words = {"mlp_hidden_size": "d_mlp"}.get(key, key)
    commands = [("train", "weights.toml", "--set", 'model.pretrained="m"')]
    if key != "dmpo_tokenizer":  # which importing only copies
        commands.append(("import", "m", "--out", "new"))
    for command in commands:
        line = refused(*command)
        assert "m/config.json: " in line and words in line and len(line) < 400
    assert not (here / "new").exists()


def test_import_refuses_odd_numbers(refused, here):
    for key, value in (("rope_theta", NAN), ("mask_token_id", -5), ("eos_token_id", [250, 999])):
        (here / "m" / "config.json").write_text(json.dumps({**hf.LLADA, key: value}))
        assert f"m/config.json: {key} = " in refused("import", "m", "--out", "new")


def test_lists_of_end_tokens_are_read(here):
    (here / "m" / "config.json").write_text(json.dumps({**hf.LLADA, "eos_token_id": [250, 251], "pad_token_id": None}))
    model_of(locate(str(here / "m")))


# (f) SIGTERM before there is anything to save.


def catches_sigterm(pid):
    caught = int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
    return caught >> (signal.SIGTERM - 1) & 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc is absent")
@pytest.mark.parametrize("moment", ["imports", "set up"])
def test_sigterm_before_a_run_is_set_up(here, moment):
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dmpo_jax", "train", "c.toml", "--run-dir", "run"],
        cwd=here, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while process.poll() is None:
        if catches_sigterm(process.pid) if moment == "imports" else (here / "run" / "config.toml").exists():
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    if process.returncode == 17:  # it was quicker than this test: then it must have saved
        assert (here / "run" / "checkpoints" / "0").is_dir() and "saved" in out
    else:
        assert process.returncode == 143
        assert err.splitlines() == ["dmpo: stopped by SIGTERM with nothing unsaved; run the same command to go on"]
        assert not (here / "run" / "checkpoints" / "0").is_dir()


# (g) Where output cannot go.


@pytest.mark.parametrize("out", ["file", "file/x", "m", "file/x/y"])
def test_out_for_a_folder(refused, here, out):
    for command in (("export", "--run-dir", "nowhere"), ("import", "m")):
        line = refused(*command, "--out", out)
        assert f"--out {out}" in line
    assert (here / "file").read_text() == "precious"


@pytest.mark.parametrize("out", ["file/x.json", "folder.json", "x.txt"])
def test_out_for_a_file(refused, here, out):
    (here / "folder.json").mkdir()
    for command in (("eval", "c.toml", "--run-dir", "nowhere"), ("bench", "c.toml"), ("bench", "sample", "c.toml")):
        assert f"--out {out}" in refused(*command, "--out", out)


def test_out_beside_a_folder_named_like_its_items(refused, here):
    (here / "x.jsonl").mkdir()
    assert "x.jsonl" in refused("eval", "c.toml", "--run-dir", "nowhere", "--out", "x.json")


@pytest.mark.parametrize("out", ["file/x.html", "m"])
def test_out_of_a_report(refused, here, out):
    (here / "run").mkdir()
    (here / "run" / "metrics.jsonl").write_text('{"cycle": 1, "loss": 1.0}\n')
    assert out in refused("report", "run", "--out", out)


# (h) Settings that a command does not read.


@pytest.mark.parametrize(
    "text",
    ["lora.rank=2", 'run.start_from="m"', "run.cycles=3", "objective.name=dmpo", "optimizer.clip=1.0", "rollout.prompts=16",
     "checkpoint.every=3", "evaluation.every=1", "task.train_size=3"],
)  # fmt: skip
def test_eval_and_sample_refuse_what_they_do_not_use(refused, text):
    extra = ("--set", "rollout.group=2") if text == "objective.name=dmpo" else ()
    name = text.partition("=")[0]
    for command in (("eval", "c.toml", "--out", "o.json"), ("sample", "c.toml", "--prompt", "1=")):
        line = refused(*command, "--run-dir", "run", "--set", text, *extra)
        assert f"--set {name}: dmpo {command[0]} does not use it" in line


def test_eval_refuses_what_is_decided_elsewhere(refused):
    evaluate = ("eval", "weights.toml", "--out", "o.json")
    weights = ("--set", 'model.pretrained="m"', "--set", "tokenizer.kind=character")
    assert "--run-dir decides" in refused(*evaluate, "--run-dir", "run", *weights)
    assert "--model decides" in refused(*evaluate, "--model", "m", *weights)
    assert "--run-dir decides" in refused(*evaluate, "--run-dir", "run", "--set", "model.base=int8")
    assert "--data decides" in refused(*evaluate, "--run-dir", "run", "--data", "d.csv", "--set", "task.test_size=9")
    line = refused(*evaluate, "--run-dir", "run", "--set", "sampler.temperature=0.5")
    assert "evaluation.temperature = 0.0" in line
    line = refused(*evaluate, "--run-dir", "run", "--set", "sampler.temperature=0", "--set", "run.seed=3")
    assert "run: no config.toml" in line  # all read; it is the run that is missing


# (i) Reading a checkpoint says nothing on stderr.


def test_reading_a_checkpoint_is_quiet_and_changes_nothing(tmp_path):
    script = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from dmpo_jax.training.checkpoint import Checkpoints, load_params
from dmpo_jax.training.state import State
run = Path(sys.argv[1])
one = Checkpoints(run)
one.save(3, State({"a": jnp.ones(2)}, None, {"m": jnp.zeros(2)}, jnp.int32(3), jnp.uint32(0)), {"cycle": 3})
one.close()
files = lambda: {p: p.stat().st_mtime_ns for p in run.rglob("*")}
before = files()
shape = jax.ShapeDtypeStruct((2,), jnp.float32)
found = load_params(run, {"a": shape}, {"a": jax.sharding.SingleDeviceSharding(jax.devices()[0])})
assert found["a"].tolist() == [1.0, 1.0] and files() == before
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# (j) The sampler of the evaluation is a sampler too.


def test_the_evaluation_sampler_is_checked():
    drafts = {"sampler": {"drafts": 2, "cache": "dual", "block_length": 10}}
    resolve(drafts)
    with pytest.raises(UserError, match=r"evaluation\.temperature = 0\.5 in place of .*: sampler\.drafts"):
        resolve(drafts | {"evaluation": {"temperature": 0.5}})
    # Filters of random proposals do nothing in a greedy evaluation, so training may have them.
    resolve({"sampler": {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "confidence": "filtered"}})
