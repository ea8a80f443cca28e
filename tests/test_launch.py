"""Launch scripts and manifests: what can be checked of them without a cloud, and their logic against stand-ins."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LAUNCH, GOLDEN = ROOT / "launch", ROOT / "tests" / "golden"
SCRIPTS = sorted(
    path
    for path in [*LAUNCH.iterdir(), *(LAUNCH / "gke").iterdir()]
    if path.is_file() and re.match(r"#!/usr/bin/env bash|# shellcheck shell=bash", path.read_text(encoding="utf-8"))
)
CONFIG = "configs/sudoku4_dmpo.toml"
SUBMIT = ["--image", "registry.example/dmpo:1", "--run-dir", "gs://my-bucket/runs/sudoku", "--dry-run"]
RUN = [CONFIG, "--run-dir", "bucket/runs/sudoku", "--set", 'run.start_from="bucket/it\'s"']


def run(command, cwd=ROOT, path=(), **env):
    """The finished process of a command in a bare environment, with folders `path` first on PATH."""
    base = {"PATH": os.pathsep.join([*map(str, path), os.environ["PATH"]]), "HOME": os.environ.get("HOME", "/")}
    command = [str(word) for word in command]
    return subprocess.run(
        command,
        cwd=cwd,
        env=base | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def stand_in(folder: Path, name: str, body: str) -> Path:
    """A command of that name which notes its arguments in `name.calls` and then does what `body` says."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f'#!/usr/bin/env bash\nhere="{folder}"\nprintf "%s\\n" "$*" >>"$here/{name}.calls"\n{body}\n')
    file.chmod(0o755)
    return folder


def calls(folder: Path, name: str) -> list[str]:
    file = folder / f"{name}.calls"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    done = run(["bash", "-n", script])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; pip install -e '.[test]' brings it")
    done = run([shellcheck, "-x", script])
    assert done.returncode == 0, done.stdout


def test_every_script_is_known():
    assert {"tpu-vm", "tpu-host", "slurm.sbatch", "environment", "quickstart"} <= {path.name for path in SCRIPTS}
    readme = (LAUNCH / "README.md").read_text(encoding="utf-8")
    for name in ("quickstart", "local", "tpu-vm", "slurm.sbatch", "gke/submit", "tpu.Dockerfile", "gpu.Dockerfile"):
        assert name in readme


DRY_RUNS = {
    "tpu-vm-create": ["launch/tpu-vm", "--dry-run", "--spot", "--name", "my-slice", "--zone", "us-west4-b", "create"],
    "tpu-vm-setup": ["launch/tpu-vm", "--dry-run", "--bucket", "my-bucket", "setup"],
    "tpu-vm-run": ["launch/tpu-vm", "--dry-run", "--bucket", "my-bucket", "run", *RUN],
    "tpu-vm-logs": ["launch/tpu-vm", "--dry-run", "logs", "3"],
    "tpu-vm-delete": ["launch/tpu-vm", "--dry-run", "delete"],
    "slurm": ["bash", "launch/slurm.sbatch", "--dry-run", CONFIG, "--run-dir", "runs/sudoku"],
    "gke-tpu": ["launch/gke/submit", "tpu", *SUBMIT, CONFIG, "--set", 'run.start_from="/bucket/$(HOME)"'],
    "gke-gpu": ["launch/gke/submit", "gpu", *SUBMIT, "--name", "two-nodes", CONFIG, "--set", "run.cycles=4"],
}


@pytest.mark.parametrize("name", DRY_RUNS)
def test_dry_runs_print_the_golden_text_and_run_nothing(name, tmp_path):
    for command in ("gcloud", "kubectl", "srun", "tar"):
        stand_in(tmp_path, command, "exit 9")
    done = run(DRY_RUNS[name], path=[tmp_path])
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.glob("*.calls"))
    text, golden = done.stdout.replace(str(ROOT), "/path/to/dmpo_jax"), GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_commands_of_a_dry_run_can_be_pasted():
    lines = run(DRY_RUNS["tpu-vm-run"]).stdout.splitlines()
    words = run(["bash", "-c", f'set -- {lines[0]}; printf "%s\\n" "$@"']).stdout.splitlines()
    assert words[-1].startswith("--command=dmpo_jax/launch/tpu-host run ATTEMPT train")
    there = words[-1].removeprefix("--command=").replace("dmpo_jax/launch/tpu-host", "printf '%s\\n'")
    assert run(["bash", "-c", there]).stdout.splitlines() == ["run", "ATTEMPT", "train", *RUN]


def test_slurm_uses_containers_and_keeps_the_users_flags():
    command = DRY_RUNS["slurm"]
    apptainer = run(command, CONTAINER="dmpo.sif", XLA_FLAGS="--mine=1").stdout
    assert "apptainer exec --nv dmpo.sif dmpo train" in apptainer and "scheduler=true --mine=1" in apptainer
    pyxis = run(command, CONTAINER="registry.example#dmpo:1").stdout
    assert "--container-image=registry.example" in pyxis and f"--container-workdir={ROOT} dmpo train" in pyxis


BAD = {
    "no command": (["launch/tpu-vm"], "no command"),
    "unknown command": (["launch/tpu-vm", "start"], "start: expected create, setup, run, logs or delete"),
    "unknown option": (["launch/tpu-vm", "--fast", "create"], "--fast"),
    "option without value": (["launch/tpu-vm", "--zone"], "--zone"),
    "odd name": (["launch/tpu-vm", "--name", "a b;\nrm", "create"], "--name a b; rm"),
    "run without config": (["launch/tpu-vm", "--dry-run", "run"], "run needs CONFIG.toml"),
    "run of no file": (["launch/tpu-vm", "--dry-run", "run", "configs/none.toml"], "configs/none.toml"),
    "host": (["launch/tpu-host", "fly"], "fly"),
    "slurm without config": (["bash", "launch/slurm.sbatch", "--dry-run"], "no configuration"),
    "slurm option first": (["bash", "launch/slurm.sbatch", "--dry-run", "--run-dir", "x"], "--run-dir"),
    "slurm of no file": (["bash", "launch/slurm.sbatch", "--dry-run", "configs/none.toml"], "configs/none.toml"),
    "slurm outside a job": (["bash", "launch/slurm.sbatch", CONFIG], "sbatch"),
    "gke nothing": (["launch/gke/submit"], "required"),
    "gke kind": (["launch/gke/submit", "npu", *SUBMIT, CONFIG], "npu"),
    "gke topology": (["launch/gke/submit", "tpu", *SUBMIT, "--topology", "3x4", CONFIG], "--topology 3x4"),
    "gke flat": (
        ["launch/gke/submit", "tpu", *SUBMIT, "--accelerator", "tpu-v5p-slice", "--topology", "4x4", CONFIG],
        "--topology 4x4: tpu-v5p-slice comes as",
    ),
    "gke accelerator": (["launch/gke/submit", "tpu", *SUBMIT, "--accelerator", "tpu-v9", CONFIG], "tpu-v9"),
    "gke gpus": (["launch/gke/submit", "gpu", *SUBMIT, "--gpus", "3", CONFIG], "--gpus 3"),
    "gke nodes": (["launch/gke/submit", "gpu", *SUBMIT, "--nodes", "0", CONFIG], "--nodes 0"),
    "gke topology of gpus": (["launch/gke/submit", "gpu", *SUBMIT, "--topology", "4x4", CONFIG], "--topology"),
    "gke nodes of tpus": (["launch/gke/submit", "tpu", *SUBMIT, "--nodes", "4", CONFIG], "--nodes"),
    "gke name": (["launch/gke/submit", "tpu", *SUBMIT, "--name", "My_Run", CONFIG], "--name My_Run"),
    "gke run dir": (["launch/gke/submit", "tpu", *SUBMIT, "--run-dir", "/runs/x", CONFIG], "--run-dir /runs/x"),
    "gke image": (["launch/gke/submit", "tpu", *SUBMIT, "--image", 'a"\nb', CONFIG], "--image"),
    "gke config": (["launch/gke/submit", "tpu", *SUBMIT, "configs/none.toml"], "configs/none.toml"),
    "gke own option": (["launch/gke/submit", "tpu", *SUBMIT, CONFIG, "--run-dir=x"], "--run-dir=x"),
    "gke restarts": (["launch/gke/submit", "tpu", *SUBMIT, "--max-restarts", "-1", CONFIG], "--max-restarts"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_usage_gives_one_line_and_code_2(name):
    command, expected = BAD[name]
    done = run(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and expected in done.stderr, done.stderr


def manifest(kind, *options):
    done = run(["launch/gke/submit", kind, *SUBMIT, *options, CONFIG])
    assert done.returncode == 0, done.stderr
    (loaded,) = yaml.safe_load_all(done.stdout)
    (workers,) = loaded["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return loaded, job, container


TPU_SIZES = [
    ("tpu-v5-lite-podslice", "1x1", 1, 1),
    ("tpu-v5-lite-podslice", "2x2", 1, 4),
    ("tpu-v5-lite-podslice", "2x4", 2, 4),
    ("tpu-v5-lite-podslice", "4x4", 4, 4),
    ("tpu-v6e-slice", "16x16", 64, 4),
    ("tpu-v5p-slice", "2x2x1", 1, 4),
    ("tpu-v5p-slice", "2x2x4", 4, 4),
    ("tpu-v4-podslice", "4x4x8", 32, 4),
]


@pytest.mark.parametrize("accelerator, topology, hosts, chips", TPU_SIZES)
def test_hosts_and_chips_follow_from_the_topology(accelerator, topology, hosts, chips):
    _, job, container = manifest("tpu", "--accelerator", accelerator, "--topology", topology)
    assert (job["completions"], job["parallelism"], container["resources"]["limits"]["google.com/tpu"]) == (
        hosts, hosts, chips
    )  # fmt: skip
    assert hosts * chips == math.prod(map(int, topology.split("x")))
    selector = job["template"]["spec"]["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-accelerator"] == accelerator
    assert selector["cloud.google.com/gke-tpu-topology"] == topology


def test_gpu_nodes_meet_at_pod_0():
    loaded, job, container = manifest("gpu", "--nodes", "3", "--gpus", "4", "--name", "abc")
    assert (job["completions"], job["parallelism"]) == (3, 3)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert loaded["metadata"]["name"] == "abc" and loaded["spec"]["network"]["enableDNSHostnames"] is True
    args = container["args"]
    place = args[args.index("--distributed") :]
    # <jobset>-<replicated job>-<job index>-<pod index>.<subdomain, which is the jobset's name>
    assert place == ["--distributed", "abc-workers-0-0.abc:8476", "--processes", "3", "--process", "$(PROCESS)"]
    (index,) = (item for item in container["env"] if item["name"] == "PROCESS")
    assert "job-completion-index" in index["valueFrom"]["fieldRef"]["fieldPath"]
    assert container["ports"] == [{"containerPort": 8476}]


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_manifests_restart_on_17_and_disruption_and_fail_for_good_on_2(kind):
    loaded, job, container = manifest(kind, "--max-restarts", "7")
    assert (loaded["apiVersion"], loaded["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    pod = job["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] >= 300
    settings, stopped, disrupted = job["podFailurePolicy"]["rules"]
    assert {rule["action"] for rule in (settings, stopped, disrupted)} == {"FailJob"}
    for rule in (settings, stopped):
        assert rule["onExitCodes"]["containerName"] == container["name"] and rule["onExitCodes"]["operator"] == "In"
    assert settings["onExitCodes"]["values"] == [2] and 17 in stopped["onExitCodes"]["values"]
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    policy = loaded["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7  # what no rule names is a crash, and counts
    fail, again = policy["rules"]
    message = "Container dmpo for pod a/b failed with exit code {} matching FailJob rule at index {}"
    (pattern,) = fail["onJobFailureMessagePatterns"]
    assert fail["action"] == "FailJobSet" and re.search(pattern, message.format(2, 0))
    assert not re.search(pattern, message.format(17, 1)) and not re.search(pattern, message.format(17, 10))
    assert again["action"] == "RestartJobSetAndIgnoreMaxRestarts" and "onJobFailureMessagePatterns" not in again
    assert fail["onJobFailureReasons"] == again["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_pods_share_the_bucket_and_get_the_flags(kind):
    _, job, container = manifest(kind)
    pod = job["template"]
    assert pod["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"
    (bucket,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "bucket")
    assert bucket["csi"]["volumeAttributes"]["bucketName"] == "my-bucket"
    args = container["args"]
    assert args[:2] == ["train", CONFIG] and args[args.index("--run-dir") + 1] == "/bucket/runs/sudoku"
    environment = {item["name"]: item.get("value") for item in container["env"]}
    assert environment.pop("JAX_COMPILATION_CACHE_DIR").startswith("/bucket/")
    environment.pop("PROCESS", None)
    assert environment == flags_of(kind)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def flags_of(kind):
    lines = (LAUNCH / f"{kind}.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_every_flag_has_its_reason_and_a_plain_value(kind):
    lines = (LAUNCH / f"{kind}.env").read_text(encoding="utf-8").splitlines()
    for before, line in itertools.pairwise(lines):
        if not line.startswith("#"):
            assert before.startswith("# ") and re.fullmatch(r"[A-Z][A-Z_]*=[\w.=-]+", line)


def test_xla_knows_the_flags():
    script = "import jax; jax.devices()"
    flags = flags_of("gpu")
    good = run([sys.executable, "-c", script], JAX_PLATFORMS="cpu", **flags)
    assert good.returncode == 0, good.stderr
    bad = run([sys.executable, "-c", script], JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_gpu_no_such_flag=true")
    assert bad.returncode != 0 and "no_such_flag" in bad.stderr


def test_submit_gives_kubectl_the_manifest(tmp_path):
    fake = stand_in(tmp_path / "bin", "kubectl", 'cat >"$here/stdin"; exit 3')
    done = run(["launch/gke/submit", "gpu", *SUBMIT[:-1], CONFIG], path=[fake])
    assert done.returncode == 3 and calls(fake, "kubectl") == ["create -f -"]
    assert (fake / "stdin").read_text() == run(["launch/gke/submit", "gpu", *SUBMIT, CONFIG]).stdout


def test_submit_without_kubectl(tmp_path):
    done = subprocess.run(
        [sys.executable, LAUNCH / "gke" / "submit", "gpu", *SUBMIT[:-1], CONFIG],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "kubectl is not installed" in done.stderr


# gcloud's stand-in: ssh ends with the next code of codes, describe prints the next line of states.
GCLOUD = """
next() { head -n 1 "$here/$1"; sed -i 1d "$here/$1"; }
case "$*" in
  *" ssh "*run*) exit "$(next codes)" ;;
  *" scp "*) [ ! -s "$here/scp" ] || exit "$(next scp)" ;;
  *describe*) state=$(next states); [ -n "$state" ] || exit 1; echo "$state" ;;
esac
"""


def tpu_vm(tmp_path, command, codes=(), states=(), scp=()):
    fake = stand_in(tmp_path / "bin", "gcloud", GCLOUD)
    for name, values in (("codes", codes), ("states", states), ("scp", scp)):
        (fake / name).write_text("".join(f"{value}\n" for value in values))
    done = run(["launch/tpu-vm", *command], path=[fake], TPU_RETRY_SECONDS="0", TMPDIR=str(tmp_path))
    verbs = [re.search(r"ssh|scp|create|describe|delete", line)[0] for line in calls(fake, "gcloud")]
    return done, verbs, calls(fake, "gcloud")


def test_tpu_vm_goes_on_after_17_and_ends_with_other_codes(tmp_path):
    done, verbs, lines = tpu_vm(tmp_path, ["--bucket", "b1", "run", CONFIG], codes=[17, 17, 0])
    assert (done.returncode, verbs) == (0, ["ssh"] * 3) and all("--worker=all" in line for line in lines)
    for code in (2, 1):
        folder = tmp_path / str(code)
        folder.mkdir()
        done, verbs, _ = tpu_vm(folder, ["--bucket", "b1", "run", CONFIG], codes=[code])
        assert (done.returncode, verbs) == (code, ["ssh"])


def test_tpu_vm_replaces_a_spot_slice_that_was_taken_away(tmp_path):
    done, verbs, _ = tpu_vm(
        tmp_path, ["--spot", "--bucket", "b1", "run", CONFIG], codes=[255, 0], states=["SUSPENDED", "WAITING", "ACTIVE"]
    )
    assert done.returncode == 0, done.stderr
    assert verbs == ["ssh", "describe", "delete", "create", "describe", "describe", "scp", "ssh", "ssh"]


def test_tpu_vm_keeps_a_slice_whose_run_crashed(tmp_path):
    done, verbs, _ = tpu_vm(tmp_path, ["--spot", "--bucket", "b1", "run", CONFIG], codes=[1], states=["ACTIVE"])
    assert (done.returncode, verbs) == (1, ["ssh", "describe"])


def test_tpu_vm_waits_for_the_slice_and_says_when_there_will_be_none(tmp_path):
    done, verbs, _ = tpu_vm(tmp_path, ["create"], states=["ACCEPTED", "PROVISIONING", "ACTIVE"])
    assert (done.returncode, verbs) == (0, ["create"] + ["describe"] * 3)
    (tmp_path / "none").mkdir()
    done, _, _ = tpu_vm(tmp_path / "none", ["create"], states=["FAILED"])
    assert done.returncode == 1 and "FAILED" in done.stderr


def test_tpu_vm_copies_again_when_that_fails_and_gives_up_after_three_times(tmp_path):
    done, verbs, _ = tpu_vm(tmp_path, ["setup"], scp=[1, 1, 0])
    assert (done.returncode, verbs) == (0, ["scp"] * 3 + ["ssh"])
    assert (tmp_path / "dmpo_jax.tgz").stat().st_size > 10_000
    (tmp_path / "never").mkdir()
    done, verbs, _ = tpu_vm(tmp_path / "never", ["setup"], scp=[1, 1, 1])
    assert done.returncode != 0 and verbs == ["scp"] * 3


def copied(tmp_path, dmpo):
    """A copy of launch/ whose environment is a stand-in for dmpo."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / CONFIG, tmp_path / CONFIG)
    stand_in(tmp_path / "bin", "dmpo", dmpo)
    (tmp_path / "launch" / "environment").write_text('PATH="$PWD/bin:$PATH"\n')
    return tmp_path


def test_tpu_host_runs_an_attempt_once_and_ends_with_its_code(tmp_path):
    tree = copied(tmp_path, "echo progress; exit 17")
    command = [tree / "launch" / "tpu-host", "run", "100", "train", CONFIG, "--set", 'task.train_file="a b"']
    first, second = run(command), run(command)
    assert first.returncode == second.returncode == 17
    assert first.stdout == second.stdout == "progress\n"
    assert calls(tree / "bin", "dmpo") == [f'train {CONFIG} --set task.train_file="a b" --distributed auto']
    command[2] = "101"
    assert run(command).returncode == 17 and len(calls(tree / "bin", "dmpo")) == 2


def test_tpu_host_follows_a_run_whose_connection_broke(tmp_path):
    tree = copied(tmp_path, 'until [ -e "$here/go" ]; do sleep 0.1; done; exit 5')
    command = [str(tree / "launch" / "tpu-host"), "run", "7", "train", CONFIG]
    connection = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(lambda: calls(tree / "bin", "dmpo"))
        os.killpg(connection.pid, signal.SIGKILL)
        connection.wait()
        command[2] = "8"  # even another attempt does not start beside one that runs
        again = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(1.5)
        assert again.poll() is None
    finally:
        (tree / "bin" / "go").touch()
    assert again.wait(timeout=20) == 5 and len(calls(tree / "bin", "dmpo")) == 1


def wait_for(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def slurm(tmp_path, srun, container="", before=None):
    tree = copied(tmp_path, "exit 0")
    fake = stand_in(tree / "bin", "srun", srun)
    stand_in(fake, "scontrol", "")
    env = {
        "PATH": f"{fake}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
        "SLURM_SUBMIT_DIR": str(tree),
        "CONTAINER": container,
    }
    spool = tree / "spool"  # Slurm runs a copy
    spool.mkdir()
    script = shutil.copy(tree / "launch" / "slurm.sbatch", spool / "slurm_script")
    job = subprocess.Popen(
        ["bash", script, CONFIG, "--run-dir", "runs/x"],
        cwd=tree,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if before:
        wait_for(lambda: calls(fake, "srun"))
        before(job, fake)
    output, _ = job.communicate(timeout=30)
    return job.returncode, calls(fake, "srun"), calls(fake, "scontrol"), output.decode()


@pytest.mark.parametrize("code, requeued", [(0, []), (2, []), (1, []), (137, []), (17, ["requeue 42"])])
def test_slurm_requeues_what_was_stopped_after_saving(code, requeued, tmp_path):
    ended, steps, control, output = slurm(tmp_path, f'echo "$XLA_FLAGS"; exit {code}')
    assert (ended, control) == (code, requeued)
    (step,) = steps
    assert step.endswith(f"dmpo train {CONFIG} --run-dir runs/x --distributed auto") and "--kill-on-bad-exit=0" in step
    assert flags_of("gpu")["XLA_FLAGS"] in output


def test_slurm_leaves_a_cancelled_job_alone(tmp_path):
    def cancel(job, fake):
        job.send_signal(signal.SIGTERM)  # scancel ends the batch shell too; the warning before the limit does not
        time.sleep(0.2)
        (fake / "go").touch()

    ended, _, control, _ = slurm(tmp_path, 'until [ -e "$here/go" ]; do sleep 0.05; done; exit 17', before=cancel)
    assert (ended, control) == (17, [])


def test_slurm_asks_for_a_warning_and_one_task_a_gpu():
    text = (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] and "requeue" in asked
    assert asked["signal"] == "TERM@120"  # with B: it would go to the batch shell, not to the processes


@pytest.mark.parametrize("kind, accelerator", [("tpu", "tpu"), ("gpu", "cuda")])
def test_images_install_extras_that_exist(kind, accelerator):
    text = (LAUNCH / "docker" / f"{kind}.Dockerfile").read_text(encoding="utf-8")
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    (extras,) = re.findall(r"pip install --no-cache-dir '\.\[([\w,]+)\]'", text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"]) and accelerator in extras.split(",")
    (base,) = re.findall(r"^FROM python:([\d.]+)-slim$", text, re.MULTILINE)
    assert base == project["requires-python"].removeprefix(">=")
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for name in line.split()[:-1]]
    ignore = (LAUNCH / "docker" / f"{kind}.Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignore[0] == "*" and {f"!{name}" for name in copied} <= set(ignore)
    assert all((ROOT / name).exists() for name in copied)
    assert {project["readme"], *project["license-files"]} <= set(copied)  # the build reads them
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["dmpo"]
    assert json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1]) == ["dmpo"]
    assert "dmpo" in project["scripts"]
