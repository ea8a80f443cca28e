"""dmpo doctor: what it says of machines that are well, and of those that are not."""

import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest

from dmpo_jax import doctor
from dmpo_jax.cli import main
from dmpo_jax.config import resolve
from dmpo_jax.doctor import NOTE, OK, WRONG

CONFIG = """
[model]
d_model = {d_model}
n_layers = 2
n_heads = 2
d_mlp = 16
[rollout]
prompts = 8
group = 2
[evaluation]
batch = 8
[mesh]
model = {model}
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """A compilation cache of the test's own, and an environment that names no accelerator and no other process."""
    folder = tmp_path / "compiled"
    folder.mkdir()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
    for name in ("JAX_PLATFORMS", "SLURM_NTASKS", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    return folder


def config_file(tmp_path, d_model=16, model=1):
    path = tmp_path / "config.toml"
    path.write_text(CONFIG.format(d_model=d_model, model=model))
    return str(path)


def report(capsys, arguments):
    code = main(["doctor", *arguments, "--json"])
    result = json.loads(capsys.readouterr().out)
    return code, result, {(f["level"], f["subject"]): f["text"] for f in result["findings"]}


def test_a_machine_that_is_well(tmp_path, capsys):
    code, result, found = report(capsys, [config_file(tmp_path)])
    assert (code, result["ok"]) == (0, True), result
    assert f"jax {jax.__version__}" in found[OK, "packages"] and "optax" in found[OK, "packages"]
    assert found[OK, "devices"] == "8 x cpu (cpu)"
    assert found[OK, "matmul"] == "the same as NumPy's on 8 devices"
    assert found[OK, "mesh"] == "data 8 x fsdp 1 x model 1 on 8 devices"
    assert (OK, "fit") in found and found[OK, "processes"].startswith("1:")
    assert "hub" not in {subject for _, subject in found}


def test_lines_end_with_a_verdict(capsys):
    assert main(["doctor"]) == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in (OK, NOTE, WRONG) for line in lines) and verdict.startswith("nothing is wrong")
    assert not any(line.split()[1] in ("mesh", "fit") for line in lines)


def test_a_configuration_that_does_not_fit_is_wrong(tmp_path, capsys):
    code, result, found = report(capsys, [config_file(tmp_path, d_model=60_000, model=3)])
    assert code == 1 and result["verdict"].startswith("2 wrong: mesh, fit")
    assert "but there are 8 devices" in found[WRONG, "mesh"] and "GB" in found[WRONG, "fit"]


def test_groups_that_do_not_divide_are_wrong(tmp_path, capsys):
    code, _, found = report(capsys, [config_file(tmp_path), "--set", "rollout.prompts=6"])
    assert code == 1 and "rollout.prompts = 6" in found[WRONG, "mesh"]


def test_a_configuration_that_does_not_load_is_bad_usage(tmp_path, capsys):
    path = tmp_path / "bad.toml"
    path.write_text("[rollout]\npromts = 3\n")
    for arguments in (
        ["doctor", str(path)],
        ["doctor", str(tmp_path / "none.toml")],
        ["doctor", "--set", "run.seed=1"],
    ):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1


def machine(tmp_path, *files):
    """A root folder with these files, `name=content` or empty."""
    for file in files:
        name, _, content = file.partition("=")
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(content)
    (tmp_path / "root").mkdir(exist_ok=True)
    return tmp_path / "root"


GPU, TPU = ["proc/driver/nvidia/version=595"], ["dev/accel0"]
MACHINES = {
    "neither": ([], [], [], [], "", []),
    "gpu without plugin": (GPU, [], ["cpu"], [], "", [(WRONG, "gpu", "pip install -e '.[cuda]'")]),
    "tpu without plugin": (TPU, [], ["cpu"], [], "", [(WRONG, "tpu", "pip install -e '.[tpu]'")]),
    "tpu by vfio": (
        ["dev/vfio/0", "sys/bus/pci/devices/0000:00:04.0/vendor=0x1ae0\n"],
        [], ["cpu"], [], "", [(WRONG, "tpu", "pip install -e '.[tpu]'")],
    ),
    "another vendor's vfio": (["dev/vfio/0", "sys/bus/pci/devices/0/vendor=0x10de\n"], [], ["cpu"], [], "", []),
    "gpu at work": (GPU, ["jax-cuda13-plugin"], ["cpu", "gpu"], [], "", []),
    "plugin that fails": (
        GPU, ["jax-cuda13-plugin"], ["cpu"], ["Unable to initialize backend 'cuda': no libcudnn"], "",
        [(WRONG, "gpu", "does not start: Unable to initialize backend 'cuda': no libcudnn")],
    ),
    "plugin that fails silently": (TPU, ["libtpu"], ["cpu"], ["cuda"], "", [(WRONG, "tpu", "JAX does not say why")]),
    "left out by choice": (GPU, ["jax-cuda13-plugin"], ["cpu"], [], "cpu", [(NOTE, "gpu", "JAX_PLATFORMS=cpu")]),
    "asked for": (GPU, [], ["cpu"], [], "cuda,cpu", [(WRONG, "gpu", "pip install -e '.[cuda]'")]),
    "libtpu for planning": ([], ["libtpu"], ["cpu"], [], "", [(NOTE, "tpu", "libtpu is installed, but a Google TPU is not")]),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_accelerators_that_jax_does_not_use(name, tmp_path, monkeypatch):
    files, installed, platforms, reasons, asked, expected = MACHINES[name]
    monkeypatch.setattr(doctor, "version_of", lambda package: "1.0" if package in installed else None)
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: None)
    if asked:
        monkeypatch.setenv("JAX_PLATFORMS", asked)
    found = list(doctor.accelerators(platforms, reasons, machine(tmp_path, *files)))
    assert [(level, subject) for level, subject, _ in found] == [(level, subject) for level, subject, _ in expected]
    for finding, (_, _, text) in zip(found, expected, strict=True):
        assert text in finding.text


@pytest.mark.parametrize(
    "answer, wrong", [("535.104.05", True), ("580.65.06\n580.65.06", False), ("no devices", False)]
)
def test_a_driver_too_old_for_cuda_13(answer, wrong, tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{answer}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "version_of", lambda package: "0.10.2" if package == "jax-cuda13-plugin" else None)
    found = list(doctor.accelerators(["cpu", "gpu"], [], machine(tmp_path, *GPU)))
    assert [f.level for f in found] == [WRONG] * wrong
    assert not wrong or ("driver 535" in found[0].text and "580" in found[0].text)


def test_versions_out_of_range_and_packages_that_are_missing(monkeypatch):
    installed = {"dmpo_jax": "0.1.0", "jax": "0.9.1", "numpy": None}
    monkeypatch.setattr(doctor, "version_of", lambda name: installed.get(name, "99") if name != "optax" else "0.2.7")
    wrong = [f.text for f in doctor.versions() if f.level == WRONG]
    assert any(text.startswith("jax 0.9.1: expected") and "pip install 'jax" in text for text in wrong)
    assert any(text.startswith("numpy is missing") for text in wrong)
    assert not any(text.startswith(("optax", "jaxlib", "pytest")) for text in wrong)


def test_memory_of_a_container_and_disk(tmp_path, monkeypatch):
    root = machine(
        tmp_path, "proc/meminfo=MemTotal: 64000000 kB\nMemAvailable: 32000000 kB", "sys/fs/cgroup/memory.max=8000000000"
    )
    memory, disk = doctor.host(root, tmp_path)
    assert memory.text == "65.5 GB, 32.8 GB of it free; this container may use 8.0 GB"
    assert disk.subject == "disk" and str(tmp_path) in disk.text
    for free, level in ((5e8, WRONG), (5e9, NOTE), (5e10, OK)):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _, free=free: types.SimpleNamespace(free=free))
        assert list(doctor.host(root, tmp_path))[1].level == level


def test_the_compilation_cache(own_cache, tmp_path, monkeypatch):
    (own_cache / "a").write_bytes(bytes(3_000_000))
    (finding,) = doctor.cache(None)
    assert (finding.level, finding.text) == (OK, f"{own_cache}: 3.0 MB in 1 files")
    monkeypatch.setattr(doctor, "COUNTED_FILES", 1)
    (finding,) = doctor.cache(None)
    assert "at least 3.0 MB in at least 1 files" in finding.text
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "below"))
    (finding,) = doctor.cache(None)
    assert finding.level == WRONG and "cannot be written" in finding.text
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    (finding,) = doctor.cache(resolve({"run": {"compilation_cache": str(tmp_path / "new")}}))
    assert finding == (OK, "cache", f"{tmp_path / 'new'}, made at the first start")
    (finding,) = doctor.cache(resolve({"run": {"compilation_cache": ""}}))
    assert finding.level == NOTE


def test_cores(monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    for count, level, text in ((8, NOTE, "8 CPU devices"), (1, OK, "JAX_NUM_CPU_DEVICES=2"), (2, OK, "2")):
        (finding,) = doctor.cores(jax.devices()[:count])
        assert finding.level == level and text in finding.text


def test_a_device_that_multiplies_wrongly_or_not_at_all(monkeypatch):
    devices = jax.devices()[:3]

    def broken(function):
        def multiply(a, b):
            (device,) = a.devices()
            if device == devices[1]:
                raise RuntimeError("INTERNAL: out of order\nmore")
            return function(a, b) + (0.5 if device == devices[2] else 0)

        return multiply

    monkeypatch.setattr(jax, "jit", broken)
    found = list(doctor.matmuls(devices))
    assert [f.level for f in found] == [WRONG, WRONG]
    assert "INTERNAL: out of order" in found[0].text and "more" not in found[0].text
    assert "differs from NumPy by up to 0.5" in found[1].text


def test_other_processes_are_reported_but_not_called(monkeypatch):
    for name, value in (("COORDINATOR_ADDRESS", "host:1234"), ("NUM_PROCESSES", "4"), ("PROCESS_ID", "2")):
        monkeypatch.setenv(f"JAX_{name}", value)
    (finding,) = doctor.processes()
    assert finding.level == OK and "process 2 of 4, which meet at host:1234" in finding.text
    monkeypatch.delenv("JAX_PROCESS_ID")
    (finding,) = doctor.processes()
    assert finding.level == WRONG and "JAX_PROCESS_ID" in finding.text


def test_what_jax_says_is_heard_and_not_printed(capsys):
    logger = logging.getLogger("jax._src.xla_bridge")
    with doctor.listening() as said:
        logger.info("Unable to initialize backend '%s': nothing there", "tpu")
        try:
            raise ImportError("libcuda.so.1")
        except ImportError:
            logger.exception("Plugin failed")
    assert said == ["Unable to initialize backend 'tpu': nothing there", "Plugin failed (libcuda.so.1)"]
    assert capsys.readouterr() == ("", "") and logger.propagate and not logger.handlers


def test_a_backend_that_does_not_start(tmp_path):
    env = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(
        [sys.executable, "-m", "dmpo_jax", "doctor"], env=env, capture_output=True, text=True, timeout=120, check=False,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "JAX does not start (JAX_PLATFORMS=no_such_platform)" in done.stdout and "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 wrong: devices")


def test_nothing_optional_is_imported_before_it_is_used():
    """In an environment with the base dependencies alone, every command must start."""
    code = """
import sys
for name in ("math_verify", "latex2sympy2_extended", "sympy", "pyarrow", "tensorboard", "wandb"):
    sys.modules[name] = None
import dmpo_jax.cli, dmpo_jax.planning.plan, dmpo_jax.reproduction.__main__
import dmpo_jax.evaluation.evaluate, dmpo_jax.evaluation.regrade, dmpo_jax.training.loop
import dmpo_jax.tasks.math, dmpo_jax.tasks.own, dmpo_jax.grading.worker
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
