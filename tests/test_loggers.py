"""TensorBoard and Weights & Biases: what they get, that nothing is logged twice, and that no failure reaches training."""

import importlib.util
import json
import math
import sys
import threading
import types

import pytest

from dmpo_jax.config import LoggingConfig, resolve
from dmpo_jax.errors import UserError
from dmpo_jax.training import loggers
from dmpo_jax.training.loggers import Loggers, check_loggers

BOTH = LoggingConfig(tensorboard=True, wandb="sudoku")


class Recorder:
    """A logger that keeps what it gets and fails when told to."""

    def __init__(self, fail_at=None):
        self.seen, self.fail_at, self.closed = [], fail_at, 0

    def write(self, cycle, entry):
        self.seen.append((cycle, entry))
        if cycle == self.fail_at:
            raise OSError(28, "No space left\non device")

    def close(self):
        self.closed += 1


@pytest.fixture
def recorders(monkeypatch):
    """Stand-ins for both loggers, the first of which fails at cycle 2."""
    pair = Recorder(fail_at=2), Recorder()
    monkeypatch.setattr(loggers, "check_loggers", lambda config: None)
    monkeypatch.setattr(loggers, "TensorBoard", lambda *_: pair[0])
    monkeypatch.setattr(loggers, "WeightsAndBiases", lambda *_: pair[1])
    return pair


def test_nothing_is_done_unless_asked_for(tmp_path):
    both = Loggers(LoggingConfig(), tmp_path, {}, 0)
    both.write(1, {"loss": 1.0})
    both.close()
    assert not list(tmp_path.iterdir())


def test_a_failing_logger_is_switched_off_with_one_warning(recorders, tmp_path, capsys):
    broken, sound = recorders
    both = Loggers(BOTH, tmp_path, {}, 0)
    for cycle in (1, 2, 3):
        both.write(cycle, {"loss": float(cycle)})
    both.close()
    both.close()
    assert [cycle for cycle, _ in broken.seen] == [1, 2] and broken.closed == 0
    assert sound.seen == [(cycle, {"loss": float(cycle)}) for cycle in (1, 2, 3)] and sound.closed == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: logging.tensorboard is switched off") and "No space left" in line


def test_a_logger_that_does_not_open_is_left_out(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(loggers, "check_loggers", lambda config: None)
    sound = Recorder()
    monkeypatch.setattr(loggers, "WeightsAndBiases", lambda *_: sound)
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    both = Loggers(BOTH, tmp_path, {}, 0)
    both.write(1, {"loss": 1.0})
    assert sound.seen and capsys.readouterr().err.count("\n") == 1


def test_only_finite_numbers_are_logged(recorders, tmp_path):
    _, sound = recorders
    entry = {"cycle": 1, "loss": 0.5, "updates": 4, "ess/mean": math.nan, "reward/mean": math.inf, "note": "text"}
    Loggers(BOTH, tmp_path, {}, 0).write(1, entry)
    assert sound.seen == [(1, {"loss": 0.5, "updates": 4.0})]


@pytest.mark.parametrize("key, value", [("tensorboard", True), ("wandb", "p")])
def test_a_missing_package_is_named_with_its_command(key, value, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, key, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = LoggingConfig(**{key: value})
    for attempt in (lambda: check_loggers(config), lambda: Loggers(config, tmp_path, {}, 0)):
        with pytest.raises(UserError, match=f"logging.{key} = .*pip install {key}") as error:
            attempt()
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
    check_loggers(LoggingConfig())


def read_back(folder):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard comes with the extra test"
    )
    events = accumulator.EventAccumulator(str(folder), size_guidance={accumulator.SCALARS: 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_every_cycle_once_over_a_resumption(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard comes with the extra test")
    config = LoggingConfig(tensorboard=True)
    killed = Loggers(config, tmp_path, {}, 0)
    for cycle in range(1, 7):
        killed.write(cycle, {"cycle": cycle, "loss": 10.0 + cycle, "reward/mean": 0.5})
    # Nothing is closed: what was written must be readable all the same.
    assert read_back(tmp_path / "tensorboard")["loss"] == [(cycle, 10.0 + cycle) for cycle in range(1, 7)]
    resumed = Loggers(config, tmp_path, {}, 4)
    for cycle in range(5, 9):
        resumed.write(cycle, {"cycle": cycle, "loss": 20.0 + cycle, "eval/exact": 0.25})
    resumed.close()
    scalars = read_back(tmp_path / "tensorboard")
    assert scalars["loss"] == [(c, 10.0 + c) for c in range(1, 5)] + [(c, 20.0 + c) for c in range(5, 9)]
    assert scalars["reward/mean"] == [(c, 0.5) for c in range(1, 5)]
    assert scalars["eval/exact"] == [(c, 0.25) for c in range(5, 9)]


def test_a_full_disk_switches_tensorboard_off(tmp_path, capsys):
    pytest.importorskip("tensorboard", reason="tensorboard comes with the extra test")
    from tensorboard.summary.writer.record_writer import RecordWriter

    both = Loggers(LoggingConfig(tensorboard=True), tmp_path, {}, 0)
    both._loggers["tensorboard"]._records = RecordWriter(open("/dev/full", "wb", buffering=0))  # noqa: SIM115
    both.write(1, {"loss": 1.0})
    both.write(2, {"loss": 1.0})
    both.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "logging.tensorboard is switched off" in line and "No space left" in line


class Service:
    """A stand-in for W&B's server and its module: runs by id, with what was logged to each."""

    def __init__(self):
        self.runs, self.started, self.hangs = {}, [], False

    def module(self):
        def init(**options):
            self.started.append(options)
            rows = self.runs.setdefault(options["id"], [])
            finish = threading.Event().wait if self.hangs else lambda: None
            return types.SimpleNamespace(
                step=rows[-1][0] + 1 if rows else 0,
                log=lambda entry, step: rows.append((step, entry)),
                finish=finish,
            )

        return types.SimpleNamespace(init=init)


@pytest.fixture
def service(monkeypatch):
    """The stand-in, importable as wandb."""
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service.module())
    return service


def test_wandb_gets_one_run_for_one_folder_and_no_cycle_twice(service, tmp_path):
    config, resolved = LoggingConfig(wandb="sudoku"), {"run": {"seed": 3}}
    first = Loggers(config, tmp_path, resolved, 0)
    for cycle in range(1, 7):
        first.write(cycle, {"cycle": cycle, "loss": float(cycle)})
    again = Loggers(config, tmp_path, resolved, 4)
    for cycle in range(5, 9):
        again.write(cycle, {"cycle": cycle, "loss": float(cycle)})
    again.close()
    ((name, rows),) = service.runs.items()
    assert rows == [(cycle, {"loss": float(cycle)}) for cycle in range(1, 9)]
    assert (tmp_path / "wandb.id").read_text().strip() == name
    for options in service.started:
        assert options["project"] == "sudoku" and options["config"] == resolved and options["resume"] == "allow"
        assert options["dir"] == str(tmp_path)


def test_folders_have_runs_of_their_own(service, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        Loggers(LoggingConfig(wandb="sudoku"), tmp_path / folder, {}, 0).close()
    assert len(service.runs) == 2 and [options["name"] for options in service.started] == ["a", "b"]


def test_wandb_that_refuses_or_hangs_does_not_hold_the_run_up(service, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loggers, "PATIENCE_S", 0.2)
    service.hangs = True
    hanging = Loggers(LoggingConfig(wandb="sudoku"), tmp_path, {}, 0)
    hanging.write(1, {"loss": 1.0})
    hanging.close()
    assert "TimeoutError: no answer within 0.2 s" in capsys.readouterr().err

    def refuse(**_):
        raise ConnectionError("no route")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    refused = Loggers(LoggingConfig(wandb="sudoku"), tmp_path / "other", {}, 0)
    refused.write(1, {"loss": 1.0})
    assert "logging.wandb is switched off: ConnectionError: no route" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_the_section_of_the_configuration():
    assert resolve({}).logging == LoggingConfig()
    config = resolve({"logging": {"tensorboard": True}}, ["logging.wandb=my project"])
    assert config.logging == LoggingConfig(tensorboard=True, wandb="my project")
    assert json.dumps(config.logging.wandb) in config.to_toml()
    for bad in ("team/project", "a\nb", "x" * 129):
        with pytest.raises(UserError, match=r"logging\.wandb"):
            resolve({"logging": {"wandb": bad}})
    with pytest.raises(UserError, match=r"logging\.tensorbord.*tensorboard"):
        resolve({"logging": {"tensorbord": True}})
