"""One run as several processes: the same numbers, stops, restarts, deaths, disagreements."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from dmpo_jax.config import resolve
from dmpo_jax.errors import UserError
from dmpo_jax.parallel import distributed
from dmpo_jax.training import run_folder
from dmpo_jax.training.watchdog import HUNG

ROOT = Path(__file__).parents[1]
CONFIG = """
[run]
cycles = 24
samples_every = 8
compilation_cache = ""
heartbeat = 8
start_timeout = 60
[model]
d_model = 16
n_layers = 1
n_heads = 2
d_mlp = 16
[task]
train_size = 64
validation_size = 8
test_size = 8
[rollout]
prompts = 4
group = 4
[sampler]
steps = 5
temperature = 1.0
[objective]
updates = 1
masks = 2
weight_masks = 2
equal_rewards = "keep"
baseline = "none"
[optimizer]
learning_rate = 1e-3
[evaluation]
every = 12
batch = 8
[checkpoint]
every = 8
"""
TIMES = ("time/cycle_s", "time/compile_s", "tokens_per_second")
CLUSTER = ("SLURM_", "JAX_COORDINATOR", "JAX_NUM_P", "JAX_PROCESS", "OMPI_", "TPU_", "JOB_COMPLETION")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(folder, devices):
    env = {name: value for name, value in os.environ.items() if not name.startswith(CLUSTER)}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "xla"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**env, "JAX_NUM_CPU_DEVICES": str(devices), **cache}


def dmpo(*arguments, folder, devices=1, **more):
    """`dmpo train` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "dmpo_jax", "train", "tiny.toml", *map(str, arguments)],
        cwd=folder, env=environment(folder, devices) | more, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def together(number, *arguments, folder, devices=1, own=None):
    """The processes of one run; `own[i]` are further arguments of process i."""
    where = ("--distributed", f"127.0.0.1:{free_port()}", "--processes", number)
    own = own or {}
    return [
        dmpo(*arguments, *where, "--process", i, *own.get(i, ()), folder=folder, devices=devices) for i in range(number)
    ]


def finish(processes, timeout=280):
    """(exit codes, stdouts, stderrs); all are killed when one does not end in time."""
    until = time.monotonic() + timeout
    try:
        found = [process.communicate(timeout=max(until - time.monotonic(), 1)) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        pytest.fail("\n".join(f"{p.args[-6:]}: {p.communicate()}" for p in processes))
    return [process.returncode for process in processes], *map(list, zip(*found, strict=True))


def run(number, *arguments, folder, devices=1):
    """A run that must end well."""
    processes = together(number, *arguments, folder=folder, devices=devices)
    codes, outs, errs = finish(processes)
    assert codes == [0] * number, errs
    return outs, errs


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_cycles(run_dir, least, process):
    path = run_dir / "metrics.jsonl"
    while process.poll() is None and not (path.exists() and len(path.read_text().splitlines()) >= least):
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()


def final_params(run_dir):
    import orbax.checkpoint as ocp

    latest = max((run_dir / "checkpoints").iterdir(), key=lambda p: int(p.name) if p.name.isdigit() else -1)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    path, reader = (latest / "params").absolute(), ocp.StandardCheckpointer()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), reader.metadata(path).item_metadata
    )
    return jax.device_get(reader.restore(path, like))


def assert_same_run(found, wanted, exact):
    """Metrics, samples and parameters: to the bit, or to rounding."""
    entries = [lines(folder / "metrics.jsonl") for folder in (found, wanted)]
    assert len(entries[0]) == len(entries[1])
    for ours, theirs in zip(*entries, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - set(TIMES):
            assert (
                ours[name] == theirs[name] if exact else np.isclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
            ), name
    assert lines(found / "samples.jsonl") == lines(wanted / "samples.jsonl") or not exact
    check = np.testing.assert_array_equal if exact else lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)
    jax.tree.map(check, final_params(found), final_params(wanted))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("processes")
    (path / "tiny.toml").write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def two(folder):
    """A finished run of two processes that found each other as under Slurm."""
    slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    slurm["JAX_COORDINATOR_PORT"] = str(free_port())
    ids = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    codes, outs, errs = finish([dmpo("--run-dir", "two", folder=folder, **slurm, **own) for own in ids])
    assert codes == [0, 0], errs
    assert "2 processes at localhost:" in errs[0]
    assert "('data', 2)" in outs[0] and "exact" in outs[0] and "cycle 24/24" in errs[0]
    said = [line for line in (outs[1] + errs[1]).splitlines() if "[Gloo]" not in line]
    assert not said  # process 0 speaks for all
    return folder / "two"


@pytest.fixture(scope="module")
def stopped(folder, two):
    """(folder, cycle) of a run of two processes, of which one was sent SIGTERM."""
    processes = together(2, "--run-dir", "stopped", folder=folder)
    wait_for_cycles(folder / "stopped", 2, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    codes, outs, errs = finish(processes)
    assert codes == [17, 17], errs
    done = len(lines(folder / "stopped" / "metrics.jsonl"))
    assert f"stopped after cycle {done}, saved" in outs[0]
    assert 2 <= done < 24 and (folder / "stopped" / "checkpoints" / str(done)).is_dir()
    return folder / "stopped", done


def test_two_processes_equal_one(folder, two):
    codes, _, errs = finish([dmpo("--run-dir", "one", folder=folder, devices=2)])
    assert codes == [0], errs
    assert_same_run(two, folder / "one", exact=False)
    both = [json.loads((path / "summary.json").read_text()) for path in (two, folder / "one")]
    assert both[0]["test_after"]["exact"] == both[1]["test_after"]["exact"] and both[0]["compilations"] == 1
    items = [lines(path / "eval" / "after.jsonl") for path in (two, folder / "one")]
    assert items[0] == items[1] and len(items[0]) == 8
    names = {"config.toml", "metrics.jsonl", "samples.jsonl", "checkpoints", "summary.json", "eval"}
    assert {path.name for path in two.iterdir()} == names


OWN = """
def examples(split):
    if split == "train":
        return [{"prompt": str(number), "number": number} for number in range(64)]

def reward(completion, example):
    if completion.count("4") > 1:
        raise ValueError("too many")
    return sum(map(str.isdigit, completion)) / (1 + example["number"] % 5)
"""


def test_two_processes_share_the_answers_that_only_the_host_grades(folder):
    (folder / "letters.py").write_text(OWN)
    settings = (
        "task.name='own'",
        "task.file='letters.py'",
        "run.cycles=6",
        "evaluation.test=false",
        "evaluation.every=0",
    )
    settings = [part for setting in settings for part in ("--set", setting)]
    run(2, "--run-dir", "own-two", *settings, folder=folder)
    codes, _, errs = finish([dmpo("--run-dir", "own-one", *settings, folder=folder, devices=2)])
    assert codes == [0], errs
    found, wanted = (lines(folder / name / "metrics.jsonl") for name in ("own-two", "own-one"))
    assert len(found) == 6 and sum(entry["grader/failed"] for entry in found) > 0
    for entry in (*found, *wanted):
        del entry["grader/slowest_s"], entry["time/grading_s"]
    for name, entries in (("own-two", found), ("own-one", wanted)):
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / name / "metrics.jsonl").write_text(text)
    assert_same_run(folder / "own-two", folder / "own-one", exact=False)


def test_one_process_goes_on_where_two_stopped(folder, two, stopped):
    shutil.copytree(stopped[0], folder / "by-one")
    codes, outs, errs = finish([dmpo("--run-dir", "by-one", folder=folder, devices=2)])
    assert codes == [0], errs
    assert f"resuming after cycle {stopped[1]}" in outs[0]
    assert_same_run(folder / "by-one", two, exact=False)


def test_two_go_on_where_two_stopped_bit_for_bit(folder, two, stopped):
    """The restart by launch/local."""
    shutil.copytree(stopped[0], folder / "by-two")
    command = [ROOT / "launch" / "local", "-n", "2", folder / "tiny.toml", "--run-dir", folder / "by-two"]
    env = environment(folder, 1) | {"DMPO": f"{sys.executable} -m dmpo_jax"}
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert f"[0] resuming after cycle {stopped[1]}" in done.stdout and "[1] resuming" not in done.stdout
    assert_same_run(folder / "by-two", two, exact=True)


def test_launch_local_passes_sigterm_on_and_prints_its_commands(folder):
    local = ROOT / "launch" / "local"
    env = environment(folder, 1) | {"DMPO": f"{sys.executable} -m dmpo_jax"}
    shown = subprocess.run(
        [local, "-n", "3", "--dry-run", "a.toml", "--set", "x.y=1"], env=env, text=True, capture_output=True
    )
    commands = shown.stdout.splitlines()
    assert [line.rstrip()[-len("--processes 3 --process 0"):] for line in commands] == [
        f"--processes 3 --process {i}" for i in range(3)
    ]  # fmt: skip
    assert all("train a.toml --set x.y=1" in line for line in commands)
    assert subprocess.run([local, "a.toml"], env=env, capture_output=True).returncode == 2

    command = [local, "-n", "2", folder / "tiny.toml", "--run-dir", folder / "local", "--set", "run.cycles=100000"]
    process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_cycles(folder / "local", 2, process)
    process.terminate()
    codes, outs, errs = finish([process])
    assert codes == [17], errs
    assert "[0] stopped after cycle" in outs[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other(folder, victim):
    processes = together(2, "--run-dir", f"killed-{victim}", "--set", "run.cycles=100000", folder=folder)
    wait_for_cycles(folder / f"killed-{victim}", 2, processes[0])
    processes[victim].kill()
    start = time.monotonic()
    codes, _, errs = finish(processes)
    assert time.monotonic() - start < 8 + 22  # the heartbeat, and what JAX adds to it
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] not in (0, 17)
    message = errs[1 - victim]
    assert "dmpo: process" in message or "another task died" in message, message


def test_other_settings_end_all(folder, two):
    """Other settings than process 0; another run's folder; data that one process does not have."""
    processes = together(
        2, "--run-dir", "differs", folder=folder, own={1: ("--set", "optimizer.learning_rate=0.5")}
    )  # fmt: skip
    codes, _, errs = finish(processes)
    assert codes == [2, 2], errs
    for err in errs:
        assert "process 1 differs from process 0 in optimizer.learning_rate (0.5, not 0.001)" in err
        assert "Traceback" not in err
    assert not (folder / "differs").exists()


def test_a_refusal_on_one_process_ends_all(folder, two):
    codes, _, errs = finish(together(2, "--run-dir", "two", "--set", "objective.alpha=0.5", folder=folder))
    assert codes == [2, 2], errs
    assert all("another configuration (objective.alpha: 0.04 -> 0.5)" in err for err in errs)
    assert errs[0].startswith("2 processes") and errs[1].startswith("dmpo: process 0: two: holds a run")
    assert all("Traceback" not in err for err in errs)


def test_a_start_waits_and_gives_up(folder):
    process = dmpo(
        "--distributed", f"127.0.0.1:{free_port()}", "--processes", 3, "--process", 0,
        "--set", "run.start_timeout=11", folder=folder,
    )  # fmt: skip
    codes, _, errs = finish([process])
    assert codes == [1]
    said = [line for line in errs[0].splitlines() if line.startswith(("process", "dmpo"))]
    assert said[0].startswith("process 0: waiting for the 3 processes at 127.0.0.1:") and "of at most 11" in said[0]
    assert said[-1].startswith("dmpo: process 0: not all of the 3 processes") and "within 11 s" in said[-1]
    assert "Traceback" not in errs[0]


def test_a_run_that_gets_nowhere_ends(folder):
    codes, _, errs = finish([dmpo("--run-dir", "hung", "--set", "run.watchdog=0.0005", folder=folder)])
    assert codes == [HUNG], errs
    assert "loop.py" in errs[0] and "run.watchdog = 0.0005" in errs[0].splitlines()[-1]


def test_settings_of_a_machine_are_free(tmp_path):
    config = resolve({})
    other = resolve({"run": {"start_timeout": 5, "heartbeat": 9, "watchdog": 0, "compilation_cache": ""}})
    assert not run_folder.differences(config, other)
    assert run_folder.settings(tmp_path, config) == run_folder.settings(tmp_path, other)
    changed = run_folder.settings(tmp_path, resolve({"mesh": {"fsdp": 2}}))
    assert {k for k in changed if changed[k] != run_folder.settings(tmp_path, config)[k]} == {"mesh.fsdp"}


def test_a_folder_that_another_host_cannot_see(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "index", lambda: 3)
    monkeypatch.setattr(distributed, "decide", lambda name, value: "what process 0 wrote")
    monkeypatch.setattr(run_folder, "VISIBLE_S", 0)
    with pytest.raises(UserError, match="process 3: does not see the"):
        run_folder.claim_together(tmp_path, resolve({}))


@pytest.fixture
def alone(monkeypatch):
    for name in os.environ:
        if name.startswith(CLUSTER):
            monkeypatch.delenv(name)
    return monkeypatch


def test_what_the_environment_says(alone):
    find = lambda: distributed.find("auto", None, None)  # noqa: E731
    assert find() is None and distributed.find("off", None, None) is None
    alone.setenv("JAX_COORDINATOR_ADDRESS", "node7:1234")
    with pytest.raises(UserError, match="not JAX_NUM_PROCESSES, JAX_PROCESS_ID"):
        find()
    alone.setenv("JAX_NUM_PROCESSES", "4")
    alone.setenv("JAX_PROCESS_ID", "4")
    with pytest.raises(UserError, match="JAX_PROCESS_ID 4: expected 0 to 3"):
        find()
    alone.setenv("JAX_PROCESS_ID", "3")
    assert find() == distributed.Cluster("node7:1234", 4, 3)
    assert distributed.find("off", None, None) is None
    alone.setenv("JAX_PROCESS_ID", "three")
    with pytest.raises(UserError, match="JAX_PROCESS_ID=three"):
        find()


def test_slurm(alone):
    names = {"JOB_ID": "8192", "STEP_NODELIST": "gpu[03-06]", "NTASKS": "8", "PROCID": "5", "LOCALID": "1"}
    for name, value in names.items():
        alone.setenv(f"SLURM_{name}", value)
    assert distributed.find("auto", None, None) == distributed.Cluster("gpu03:61440", 8, 5, (1,))
    alone.setenv("SLURM_NTASKS", "1")
    assert distributed.find("auto", None, None) is None
    alone.setenv("SLURM_NTASKS", "8(x2)")
    with pytest.raises(UserError, match="cannot make out the other processes"):
        distributed.find("auto", None, None)
    alone.setenv("SLURM_NTASKS", "8")
    alone.delenv("SLURM_PROCID")  # a batch script's own shell, outside of srun
    assert distributed.find("auto", None, None) is None


def test_tpu_hosts(alone):
    from jax._src import cloud_tpu_init
    from jax._src.clusters import cloud_tpu_cluster

    for module in (cloud_tpu_init, cloud_tpu_cluster):
        alone.setattr(module, "running_in_cloud_tpu_vm", True)
    alone.setenv("TPU_SKIP_MDS_QUERY", "1")  # as on GKE: no metadata server
    alone.setattr(cloud_tpu_cluster, "get_tpu_env_value", lambda key: None)
    alone.setenv("TPU_WORKER_HOSTNAMES", "localhost,localhost")
    alone.setenv("TPU_WORKER_ID", "1")
    assert distributed.find("auto", None, None) == distributed.Cluster("localhost:8482", 2, 1)
    alone.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    alone.setenv("TPU_WORKER_ID", "0")
    assert distributed.find("auto", None, None) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("auto", 2, 0), "--processes 2 goes with --distributed HOST:PORT"),
        (("off", None, 0), "--process 0 goes with --distributed HOST:PORT"),
        (("a:1", 2, None), "needs --process too"),
        (("a:1", None, 1), "needs --processes too"),
        (("a:1", 2, 2), "--process 2: expected 0 to 1"),
        (("a:1", 2, -1), "--process -1: expected 0 to 1"),
        (("a:1", 0, 0), "--processes 0: expected 1 or more"),
        (("on", 2, 0), "expected auto, off or HOST:PORT"),
        (("host", 2, 0), "expected auto, off or HOST:PORT"),
        (("host:70000", 2, 0), "port from 1 to 65535"),
        (("ho st:7", 2, 0), "expected auto, off or HOST:PORT"),
    ],
)
def test_bad_flags(arguments, said):
    with pytest.raises(UserError) as caught:
        distributed.find(*arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert distributed.find("[::1]:77", 2, 1).process == 1 and distributed.find("a.b-c:77", 1, 0) is None


def test_one_process_agrees_with_itself():
    assert distributed.share("x", {"a": 1}) == [{"a": 1}] and distributed.decide("x", 3) == 3
    assert distributed.any_of("x", True) and not distributed.any_of("x", False)
    distributed.compare("x", {"a": 1})
    trees = [{"a": np.arange(3)}, {"a": np.arange(3, dtype=np.int32)}, {"a": np.arange(1, 4)}, ("ab", "c"), ("a", "bc")]
    assert len({distributed.fingerprint(tree) for tree in trees}) == len(trees)
    assert distributed.fingerprint(trees[0]) == distributed.fingerprint({"a": np.arange(3)})
    with pytest.raises(OSError, match="disk"), distributed.ending_together():
        raise OSError("disk")


@pytest.mark.slow
def test_four_processes_equal_one_and_their_checkpoint_serves_one_and_two(folder):
    codes, _, errs = finish([dmpo("--run-dir", "one-of-4", folder=folder, devices=4)], 300)
    assert codes == [0], errs
    run(4, "--run-dir", "four", folder=folder)
    assert_same_run(folder / "four", folder / "one-of-4", exact=False)
    run(4, "--run-dir", "part", "--set", "run.cycles=20", folder=folder)
    for number in (1, 2):
        name = f"part-{number}"
        shutil.copytree(folder / "part", folder / name)
        if number == 1:
            codes, _, errs = finish([dmpo("--run-dir", name, folder=folder, devices=4)])
            assert codes == [0], errs
        else:
            run(2, "--run-dir", name, folder=folder, devices=2)
        assert_same_run(folder / name, folder / "one-of-4", exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 1, 2), (1, 2, 2)])
def test_parameters_split_between_processes(folder, mesh):
    """Two processes of two devices: fsdp and model axes across them, saved by all, read by one."""
    name = "mesh-" + "".join(map(str, mesh))
    split = [f"--set=mesh.{axis}={size}" for axis, size in zip(("data", "fsdp", "model"), mesh, strict=True)]
    codes, _, errs = finish(
        [dmpo("--run-dir", f"{name}-one", "--set", "run.cycles=20", *split, folder=folder, devices=4)]
    )
    assert codes == [0], errs
    run(2, "--run-dir", name, "--set", "run.cycles=10", *split, folder=folder, devices=2)
    run(2, "--run-dir", name, "--set", "run.cycles=20", *split, folder=folder, devices=2)
    assert_same_run(folder / name, folder / f"{name}-one", exact=False)
