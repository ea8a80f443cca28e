"""`dmpo doctor`: what this machine has, what is installed, and whether they fit together and a configuration fits them."""

import glob
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement  # comes with matplotlib

from dmpo_jax.config import Config, RunConfig, load_config
from dmpo_jax.errors import UserError, one_line

OK, NOTE, WRONG = "ok", "note", "wrong"
PLUGINS = ("libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")
DRIVER_FOR_CUDA_13 = 580  # the first driver series that CUDA 13 runs on
SCARCE_DISK, LITTLE_DISK = 1e9, 10e9  # bytes free in the current folder
COUNTED_FILES = 20_000  # of a compilation cache; beyond, its size is a lower bound
WAIT_S = 60.0  # for devices, before it is said what may be the matter


class Finding(NamedTuple):
    """One line of the report: level (ok, note or wrong), what it is about, and what was found."""

    level: str
    subject: str
    text: str


def doctor(config_path: str | None, overrides: Sequence[str], as_json: bool) -> int:
    """Prints the report. Returns 0, or 1 if something is wrong; raises UserError on a configuration that does not load."""
    config = load_config(config_path, overrides) if config_path else None
    findings = []
    for finding in examine(config):
        findings.append(finding)
        if not as_json:
            print(f"{finding.level:<6}{finding.subject:<13}{one_line(finding.text)}", flush=True)
    wrong = [finding.subject for finding in findings if finding.level == WRONG]
    notes = sum(finding.level == NOTE for finding in findings)
    verdict = f"{len(wrong)} wrong: {', '.join(wrong)}" if wrong else "nothing is wrong"
    verdict += f"; {notes} note{'s' * (notes != 1)}" if notes else ""
    if as_json:
        print(json.dumps({"ok": not wrong, "verdict": verdict, "findings": [f._asdict() for f in findings]}, indent=1))
    else:
        print(verdict)
    return 1 if wrong else 0


def examine(config: Config | None) -> Iterator[Finding]:
    """Every finding, each as soon as it is known."""
    yield from versions()
    yield from host()
    yield from cache(config)
    devices, reasons = yield from devices_and_reasons()
    yield from accelerators(sorted({device.platform for device in devices}), reasons)
    if devices:
        yield from cores(devices)
        yield from matmuls(devices)
        cluster = yield from processes()
        if config:
            yield from fit(config, devices, cluster)
    if config:
        yield from hub(config)


def versions() -> Iterator[Finding]:
    """Python, the packages this project needs with the versions it was written for, and accelerator plugins."""
    yield Finding(OK, "python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    found, wrong = [f"dmpo_jax {version_of('dmpo_jax')}"], []
    for text in ("jaxlib", *(importlib.metadata.requires("dmpo_jax") or ())):
        requirement = Requirement(text)
        if requirement.marker:
            continue  # of an extra
        version = version_of(requirement.name)
        found.append(f"{requirement.name} {version or 'missing'}")
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            is_now = f"{requirement.name} {version or 'is missing'}"
            wrong.append(f"{is_now}: expected {requirement.specifier or 'any version'}; pip install '{text}'")
    yield Finding(OK, "packages", ", ".join(found))
    for text in wrong:
        yield Finding(WRONG, "packages", text)
    plugins = [f"{name} {version}" for name in PLUGINS if (version := version_of(name))]
    yield Finding(OK, "plugins", ", ".join(plugins) or "none: JAX runs on the CPU")


def version_of(package: str) -> str | None:
    """The installed version, None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def host(root: Path = Path("/"), folder: Path = Path()) -> Iterator[Finding]:
    """Memory that this process may use, and disk in `folder`. `root` is where /proc and /sys are."""
    total = {line.split(":")[0]: line for line in read(root / "proc/meminfo").splitlines()}
    have = {key: int(total[key].split()[1]) * 1024 for key in ("MemTotal", "MemAvailable") if key in total}
    if have:
        text = f"{have['MemTotal'] / 1e9:.1f} GB, {have.get('MemAvailable', 0) / 1e9:.1f} GB of it free"
        limit = read(root / "sys/fs/cgroup/memory.max").strip()  # of a container
        if limit.isdigit() and int(limit) < have["MemTotal"]:
            text += f"; this container may use {int(limit) / 1e9:.1f} GB"
        yield Finding(OK, "memory", text)
    free = shutil.disk_usage(folder).free
    text = f"{free / 1e9:.1f} GB free in {folder.absolute()}"
    if not os.access(folder, os.W_OK):
        yield Finding(NOTE, "disk", f"{text}, which cannot be written; give --run-dir another folder")
    elif free < SCARCE_DISK:
        yield Finding(WRONG, "disk", f"{text}: too little for checkpoints; free some, or give --run-dir another folder")
    else:
        yield Finding(NOTE if free < LITTLE_DISK else OK, "disk", text)


def read(path: Path) -> str:
    """A system file's text, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cache(config: Config | None) -> Iterator[Finding]:
    """The folder of compiled programs: its size, and whether it can be written."""
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR") or (config.run if config else RunConfig()).compilation_cache
    if not named:
        yield Finding(NOTE, "cache", 'run.compilation_cache = "": every start compiles anew')
        return
    if "://" in named:
        yield Finding(OK, "cache", f"{named}, not looked into")
        return
    path = Path(named).expanduser()
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Finding(
            WRONG, "cache", f"{path}: {there} cannot be written; set run.compilation_cache or JAX_COMPILATION_CACHE_DIR"
        )
    elif there != path:
        yield Finding(OK, "cache", f"{path}, made at the first start")
    else:
        count, size = 0, 0
        for file in path.rglob("*"):
            if count == COUNTED_FILES:
                break
            count += 1
            size += file.stat().st_size if file.is_file() else 0
        more = "at least " * (count == COUNTED_FILES)
        yield Finding(OK, "cache", f"{path}: {more}{size / 1e6:.1f} MB in {more}{count} files")


def devices_and_reasons() -> Iterator[Finding]:
    """The devices of this process, and what JAX said of backends that did not start (returned, as a pair)."""
    import jax

    waiting = threading.Timer(
        WAIT_S,
        lambda: print(
            "still waiting for devices: a TPU slice of several hosts answers when the command runs on all of them, and a chip "
            "that another process uses does not answer at all",
            file=sys.stderr,
        ),
    )
    waiting.daemon = True
    waiting.start()
    try:
        with listening() as said:
            devices = jax.local_devices()
    except RuntimeError as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        because = f" (JAX_PLATFORMS={platforms})" if platforms else ""
        yield Finding(WRONG, "devices", f"JAX does not start{because}: {first_line(error)}")
        return [], said
    finally:
        waiting.cancel()
    kinds: dict[str, list] = {}
    for device in devices:
        kinds.setdefault(device.device_kind, []).append(device)
    for kind, same in kinds.items():
        limit = (same[0].memory_stats() or {}).get("bytes_limit")
        memory = f", {limit / 1e9:.1f} GB each" if limit else ""
        yield Finding(OK, "devices", f"{len(same)} x {kind} ({same[0].platform}){memory}")
    return devices, said


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collects what JAX says while it starts backends; nothing of it is printed."""
    said: list[str] = []
    ear = logging.Handler()
    ear.emit = lambda record: said.append(one_line(record.getMessage() + failure(record)))
    logger = logging.getLogger("jax._src.xla_bridge")
    before = logger.level, logger.propagate
    logger.addHandler(ear)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield said
    finally:
        logger.removeHandler(ear)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def failure(record: logging.LogRecord) -> str:
    """The exception that a log record reports, if any."""
    return f" ({record.exc_info[1]})" if record.exc_info and record.exc_info[1] else ""


def first_line(error: BaseException) -> str:
    """The beginning of an exception's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def accelerators(platforms: Sequence[str], reasons: Sequence[str], root: Path = Path("/")) -> Iterator[Finding]:
    """Accelerators that are in the machine but not in JAX, with what to do; `platforms` are those JAX runs on."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    for name, present, plugins, extra, word in (
        ("tpu", has_tpu(root), ("libtpu",), "tpu", "tpu"),
        ("gpu", has_gpu(root), ("jax-cuda13-plugin", "jax-cuda12-plugin"), "cuda", "cuda"),
    ):
        installed = [plugin for plugin in plugins if version_of(plugin)]
        what = "a Google TPU" if name == "tpu" else "an NVIDIA GPU"
        if name in platforms or (not present and not installed):
            continue
        if not present:
            yield Finding(NOTE, name, f"{', '.join(installed)} is installed, but {what} is not in this machine")
        elif asked and not {name, word} & set(asked.split(",")):
            yield Finding(NOTE, name, f"{what} is there, but JAX_PLATFORMS={asked} leaves it out; unset it to use it")
        elif not installed:
            yield Finding(
                WRONG, name, f"{what} is there, but JAX runs without it: pip install -e '.[{extra}]' in the repository"
            )
        else:
            why = next((text for text in reasons if word in text.lower()), "JAX does not say why")
            yield Finding(
                WRONG, name, f"{what} is there and {', '.join(installed)} installed, but does not start: {why[:300]}"
            )
    driver = nvidia_driver() if has_gpu(root) else None
    if driver and version_of("jax-cuda13-plugin") and int(driver.split(".")[0]) < DRIVER_FOR_CUDA_13:
        text = f"driver {driver}: CUDA 13 needs {DRIVER_FOR_CUDA_13} or newer; update it, or pip install 'jax[cuda12]'"
        yield Finding(WRONG, "gpu", text)


def has_tpu(root: Path) -> bool:
    """Whether TPU chips are attached: device files of their driver, or Google's PCI devices bound to VFIO."""
    if glob.glob(str(root / "dev/accel[0-9]*")):
        return True
    vendors = (read(Path(path)).strip() for path in glob.glob(str(root / "sys/bus/pci/devices/*/vendor")))
    return bool(glob.glob(str(root / "dev/vfio/[0-9]*"))) and "0x1ae0" in vendors


def has_gpu(root: Path) -> bool:
    """Whether the NVIDIA driver is there."""
    return any((root / path).exists() for path in ("proc/driver/nvidia/version", "dev/nvidia0", "dev/nvidiactl"))


def nvidia_driver() -> str | None:
    """The driver's version as nvidia-smi has it, None where it does not answer."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = done.stdout.strip().splitlines()[:1]
    return version[0] if done.returncode == 0 and version and version[0].split(".")[0].isdigit() else None


def cores(devices: Sequence[Any]) -> Iterator[Finding]:
    """CPU cores of this process, against the CPU devices made of them."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    made = sum(device.platform == "cpu" for device in devices)
    if made > count:
        yield Finding(
            NOTE, "cores", f"{count}, shared by {made} CPU devices; JAX_NUM_CPU_DEVICES={count} is as many as help"
        )
    elif made and made < count:
        yield Finding(
            OK, "cores", f"{count}; JAX_NUM_CPU_DEVICES={count} makes a device of each: faster for small models"
        )
    else:
        yield Finding(OK, "cores", f"{count}")


def matmuls(devices: Sequence[Any]) -> Iterator[Finding]:
    """A product on every device against NumPy's, of numbers whose products and sums every precision holds exactly."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    left, right = (rng.integers(-4, 5, size=(128, 128)).astype(np.float32) for _ in range(2))
    product, bad = jax.jit(lambda a, b: a @ b), 0
    for device in devices:
        try:
            result = np.asarray(product(jax.device_put(left, device), jax.device_put(right, device)))
        except Exception as error:
            bad += 1
            yield Finding(WRONG, "matmul", f"{device}: {first_line(error)}")
            continue
        if not np.array_equal(result, left @ right):
            bad += 1
            yield Finding(
                WRONG, "matmul", f"{device}: differs from NumPy by up to {np.abs(result - left @ right).max():g}"
            )
    if not bad:
        yield Finding(OK, "matmul", f"the same as NumPy's on {len(devices)} device{'s' * (len(devices) != 1)}")


def processes() -> Iterator[Finding]:
    """The cluster that `dmpo train` would find here (returned), None for a run of one process."""
    from dmpo_jax.parallel import distributed

    try:
        cluster = distributed.find("auto", None, None)
    except UserError as error:
        yield Finding(WRONG, "processes", str(error))
        return None
    if cluster is None:
        yield Finding(OK, "processes", "1: the environment names no others")
    else:
        which = f"process {cluster.process} of {cluster.processes}, which meet at {cluster.address}"
        yield Finding(OK, "processes", f"{which}; they were not called")
    return cluster


def fit(config: Config, devices: Sequence[Any], cluster) -> Iterator[Finding]:
    """Whether the configuration divides over the devices and is not certain to exceed their memory."""
    from dmpo_jax.parallel.mesh import check_shape
    from dmpo_jax.training.memory import check_memory

    count = len(devices)
    if cluster:
        count = cluster.processes * (len(cluster.devices) if cluster.devices else count)
    shape = config.mesh.shape(count)
    data, fsdp, model = shape
    try:
        check_shape(shape, count)
        config.validate_mesh(data * fsdp, shape)
        yield Finding(OK, "mesh", f"data {data} x fsdp {fsdp} x model {model} on {count} device{'s' * (count != 1)}")
    except UserError as error:
        yield Finding(WRONG, "mesh", str(error))
    try:
        check_memory(config)
        yield Finding(OK, "fit", "the least that this configuration needs is there; what training adds is not counted")
    except UserError as error:
        yield Finding(NOTE if cluster else WRONG, "fit", f"{error}{' (of this process alone)' if cluster else ''}")


def hub(config: Config) -> Iterator[Finding]:
    """Whether the hub answers, where the configuration takes weights from it."""
    source = config.model.pretrained
    if not source or Path(source).expanduser().exists():
        return
    import huggingface_hub

    try:
        huggingface_hub.model_info(source.partition("@")[0], timeout=20)
        yield Finding(OK, "hub", f"{source} can be had")
    except Exception as error:
        yield Finding(NOTE, "hub", f"{source}: {type(error).__name__}; only what is in the local cache can be used")
