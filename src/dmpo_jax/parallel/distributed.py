"""The processes of one run: how they find each other, agree, and end together.

All talk goes through the key-value store of JAX's coordination service, which process 0 holds, so none of it waits for
a device. In a run of one process every function here is a plain answer.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dmpo_jax.errors import UserError, ending, one_line

SAY_EVERY = 10.0  # seconds between lines about waiting
LOOK_EVERY = 1.0  # seconds between looks at whether another process has failed
LINGER = 3 * LOOK_EVERY  # how long process 0 keeps the store open, so that the others can read why it ends
BARRIER_MS = 24 * 3600 * 1000  # longer than any cycle; dead processes are found by their missing heartbeats


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where the processes of a run meet (`host:port` of process 0), how many they are and which one this is.

    `devices` are the local ones this process may use; None: all.
    """

    address: str
    processes: int
    process: int
    devices: tuple[int, ...] | None = None


class LostProcess(RuntimeError):
    """Other processes have not come, or are gone: no mistake in the configuration, so one line but not code 2."""


@dataclasses.dataclass
class _Joined:
    """What this process knows once it has joined the others."""

    cluster: Cluster
    client: Any
    timeout: int
    ending: threading.Event


_joined: _Joined | None = None  # as JAX's own connection: one per process


def count() -> int:
    """Processes in this run."""
    return _joined.cluster.processes if _joined else 1


def index() -> int:
    """Which of them this is."""
    return _joined.cluster.process if _joined else 0


def is_main() -> bool:
    """Whether this process is the one that writes files and progress."""
    return index() == 0


def say(text: str, file=None) -> None:
    """Prints a line, on process 0 alone."""
    if is_main():
        print(text, file=file or sys.stdout, flush=True)


def find(where: str, processes: int | None, process: int | None) -> Cluster | None:
    """The cluster of `--distributed where --processes N --process I`; None for a run of one process.

    `where` is off, auto (what the environment says: JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID,
    Slurm, Cloud TPU, Open MPI, an indexed Kubernetes job) or HOST:PORT of process 0. Raises UserError.
    """
    if where in ("auto", "off"):
        for option, value in (("--processes", processes), ("--process", process)):
            if value is not None:
                raise UserError(f"{option} {value} goes with --distributed HOST:PORT; --distributed is {where}")
        return _from_environment() if where == "auto" else None
    for option, value in (("--processes", processes), ("--process", process)):
        if value is None:
            raise UserError(
                f"--distributed {where} needs {option} too: how many processes there are, and which this is"
            )
    return _checked(Cluster(_address("--distributed", where), processes, process), "--processes", "--process")


def _address(name: str, text: str) -> str:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", text)
    if not match or not 1 <= int(match[2]) <= 65535:
        raise UserError(f"{name} {text}: expected auto, off or HOST:PORT of process 0, with a port from 1 to 65535")
    return text


def _checked(cluster: Cluster, count_name: str, index_name: str) -> Cluster | None:
    if cluster.processes < 1:
        raise UserError(f"{count_name} {cluster.processes}: expected 1 or more")
    if not 0 <= cluster.process < cluster.processes:
        raise UserError(
            f"{index_name} {cluster.process}: expected 0 to {cluster.processes - 1}, the last of the processes"
        )
    return cluster if cluster.processes > 1 else None


def _from_environment() -> Cluster | None:
    names = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
    address, *numbers = (os.environ.get(name) or None for name in names)
    processes, process = (_number(*pair) for pair in zip(names[1:], numbers, strict=True))
    devices = None
    if None in (address, processes, process) and _in_a_cluster():
        address, processes, process, devices = _detected(address, processes, process)
    found = address, processes, process
    if found in ((None, None, None), (None, 1, None), (None, 1, 0)):
        return None
    if None in found:
        missing = ", ".join(name for name, value in zip(names, found, strict=True) if value is None)
        there = ", ".join(name for name, value in zip(names, found, strict=True) if value is not None)
        raise UserError(f"--distributed auto: the environment has {there} but not {missing}; set all three, or "
                        "--distributed off")  # fmt: skip
    cluster = Cluster(_address("JAX_COORDINATOR_ADDRESS", address), processes, process, devices)
    return _checked(cluster, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def _number(name: str, text: str | None) -> int | None:
    if text is not None and not re.fullmatch(r"\d{1,6}", text):
        raise UserError(f"{name}={text}: expected a number; --distributed auto reads it, --distributed off does not")
    return None if text is None else int(text)


def _in_a_cluster() -> bool:
    """Whether JAX's detection has anything to look for. Without a sign of one it may query metadata servers or warn."""
    from jax._src import cloud_tpu_init

    several = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    return (
        any(os.environ.get(name, "1") != "1" for name in several)
        or "JOB_COMPLETION_INDEX" in os.environ
        or cloud_tpu_init.running_in_cloud_tpu_vm
    )


def _detected(address: str | None, processes: int | None, process: int | None):
    from jax._src.clusters import ClusterEnv  # initialize() would do this too, but raises where there is one process

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about packages that other kinds of cluster would need
            found = ClusterEnv.auto_detect_unset_distributed_params(address, processes, process, None, None, 60)
    except Exception as error:  # malformed variables, no answer from a metadata server, ...
        raise UserError(
            f"--distributed auto: cannot make out the other processes ({type(error).__name__}: {str(error)[:200]}); "
            "use --distributed HOST:PORT --processes N --process I, or --distributed off"
        ) from None
    return *found[:3], None if found[3] is None else tuple(found[3])


def start(cluster: Cluster, timeout: int, heartbeat: int) -> None:
    """Joins the other processes; must come before any use of devices. Says every now and then whom it waits for.

    Raises LostProcess when they are not all there after `timeout` seconds. From then on a process that is silent for
    `heartbeat` seconds counts as dead, and JAX ends the others.
    """
    global _joined
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from the run's own handler
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                cluster.address,
                cluster.processes,
                cluster.process,
                local_device_ids=cluster.devices,
                cluster_detection_method="deactivate",
                initialization_timeout=timeout + 60,  # this function gives up first, in its own words
                heartbeat_timeout_seconds=heartbeat,
            )
        except BaseException as error:
            failed.append(error)

    # In a thread of its own, as signals are not handled while the main one is inside JAX.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    whom = f"{_processes(cluster.processes)} at {cluster.address}"
    begun = time.monotonic()
    while thread.is_alive():
        thread.join(max(min(SAY_EVERY, begun + timeout - time.monotonic()), 0.01))
        seconds = time.monotonic() - begun
        if thread.is_alive() and seconds >= timeout:
            raise LostProcess(
                f"process {cluster.process}: not all of the {whom} came within {timeout} s; see that each was started "
                "and reaches that address, or raise run.start_timeout"
            )
        if thread.is_alive():
            me = f"process {cluster.process}: waiting for the {whom}"
            print(f"{me}, {seconds:.0f} s of at most {timeout}", file=sys.stderr, flush=True)
    if failed:
        text = " ".join(str(failed[0]).split())[:200]
        raise LostProcess(f"process {cluster.process} cannot join the {whom}: {text}")
    from jax._src.distributed import global_state

    _joined = _Joined(cluster, global_state.client, timeout, threading.Event())
    threading.Thread(target=_end_with_the_others, args=(_joined,), daemon=True).start()
    say(f"{_processes(cluster.processes)} at {cluster.address}", file=sys.stderr)


def stop() -> None:
    """Leaves, once all processes are done."""
    if _joined:
        _joined.ending.set()
        jax.distributed.shutdown()


def _processes(number: int) -> str:
    return f"{number} processes"


def share(name: str, value: Any) -> list[Any]:
    """The JSON value of every process, in order of process. All must call it, once for each `name`.

    Waits for all of them, saying for whom. Raises LostProcess after the time that the start may take.
    """
    if not _joined:
        return [value]
    folder, client, begun, said = f"dmpo/{name}/", _joined.client, time.monotonic(), 1
    client.key_value_set(f"{folder}{index()}", json.dumps(value))
    pause = 0.01
    while True:  # not a barrier, so that signals are handled and the missing can be named
        found = {int(key.rsplit("/", 1)[1]): text for key, text in client.key_value_dir_get(folder)}
        if len(found) == count():
            return [json.loads(found[process]) for process in range(count())]
        seconds = time.monotonic() - begun
        missing = ", ".join(str(process) for process in range(count()) if process not in found)
        if seconds > _joined.timeout:
            raise LostProcess(
                f"process {index()}: gave up waiting for process {missing} at '{name}' after {_joined.timeout} s "
                "(run.start_timeout)"
            )
        if seconds > said * SAY_EVERY:
            said += 1
            text = f"process {index()}: waiting for process {missing} at '{name}'"
            print(f"{text}, {seconds:.0f} s of at most {_joined.timeout}", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def decide(name: str, value: Any) -> Any:
    """Process 0's value, on every process: what is read from a file system that may show each host something else."""
    return share(name, value)[0]


def compare(name: str, facts: dict[str, Any]) -> None:
    """Raises UserError, naming process and facts, on every process when one has other facts than process 0."""
    first, *others = share(name, facts)
    for process, found in enumerate(others, 1):
        different = [key for key in first | found if first.get(key) != found.get(key)]
        if different:
            told = ", ".join(f"{key} ({found.get(key)!r}, not {first.get(key)!r})" for key in different[:5])
            raise UserError(
                f"process {process} differs from process 0 in {told}; start all processes with the same command, files "
                "and versions"
            )


def any_of(name: str, flag: bool) -> bool:
    """Whether the flag is up on any process: the same answer on all. All must call it, once for each `name`."""
    if not _joined:
        return flag
    folder, client = f"dmpo/{name}/", _joined.client
    if flag:
        client.key_value_set(f"{folder}{index()}", "1")
    client.wait_at_barrier(f"dmpo/{name}", BARRIER_MS)
    return bool(client.key_value_dir_get(folder))


def fingerprint(tree: Any) -> str:
    """Hash of host data: a tree of arrays and strings."""
    total = hashlib.blake2b(digest_size=8)
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, str):
            total.update(leaf.encode("utf-8", "surrogatepass") + b"\0")
        else:
            array = np.ascontiguousarray(leaf)
            total.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return total.hexdigest()


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Where there are several processes, an error inside ends this one at once, with its line, having told the others.

    An ordinary way out would first wait for processes that wait for this one.
    """
    try:
        yield
    except BaseException as error:
        if not (_joined or isinstance(error, LostProcess)):
            raise
        ended = (1, str(error)) if isinstance(error, LostProcess) else ending(error)
        if ended is None:
            traceback.print_exception(error)
            ended = 1, f"process {index()} failed ({type(error).__name__}: {str(error)[:200]}); see its traceback"
        end(*ended)


def end(code: int, text: str) -> None:
    """Ends this process with one line on stderr, having told the others, who end with the same code."""
    text = one_line(text)
    os.write(2, f"dmpo: {text}\n".encode())
    if _joined:
        _joined.ending.set()
        tell = threading.Thread(target=_tell, args=(_joined, f"{code} {text}"), daemon=True)
        tell.start()
        tell.join(LINGER)  # there may be nobody left who listens
        if is_main():
            time.sleep(LINGER)
    sys.stdout.flush()
    os._exit(code)


def _tell(joined: _Joined, text: str) -> None:
    with contextlib.suppress(Exception):
        joined.client.key_value_set(f"dmpo/failed/{joined.cluster.process}", text)


def _end_with_the_others(joined: _Joined) -> None:
    """Ends this process when another has said that it ends. Those that die without a word are JAX's matter."""
    while not joined.ending.wait(LOOK_EVERY):
        try:
            failed = joined.client.key_value_dir_get("dmpo/failed/")
        except Exception:  # the store's process is gone; JAX sees that too, and ends this one
            continue
        if failed and not joined.ending.is_set():
            key, told = failed[0]
            code, _, text = told.partition(" ")
            process = key.rsplit("/", 1)[1]
            told = text if text.startswith(f"process {process}") else f"process {process}: {text}"
            os.write(2, f"dmpo: {told}\n".encode())
            os._exit(int(code))
