"""The host's part of a run: data in, metrics out, checkpoints and evaluations between cycles."""

import dataclasses
import importlib.metadata
import json
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dmpo_jax.config import Config, LoggingConfig
from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.evaluate import Evaluator, load_examples, write_items
from dmpo_jax.inputs import read_json
from dmpo_jax.model.lora import digest, policy_of
from dmpo_jax.model.parameters import count_params
from dmpo_jax.parallel import distributed
from dmpo_jax.parallel.mesh import make_mesh, row_shards
from dmpo_jax.training import run_folder
from dmpo_jax.training.alarms import Alarms
from dmpo_jax.training.checkpoint import Checkpoints
from dmpo_jax.training.cycle import Record, empty_replay, make_cycle
from dmpo_jax.training.data import Batch, Batches, encoded, place
from dmpo_jax.training.host_cycle import Cycle, compile_host_cycle
from dmpo_jax.training.host_grading import HostGrader, host_grader
from dmpo_jax.training.initial import check_start, initial_policy
from dmpo_jax.training.loggers import Loggers
from dmpo_jax.training.metrics import JsonLines, NoLines, Progress, write_text
from dmpo_jax.training.setup import Setup, make_setup
from dmpo_jax.training.state import State, fresh_state
from dmpo_jax.training.teacher import load_teacher, with_teacher
from dmpo_jax.training.watchdog import Watchdog

PREEMPTED = 17
RESTORE = "restore it, or start in a new run folder"


def train(config: Config, run_dir: Path) -> int:
    """Runs, or goes on with, a configuration in its folder. Returns the exit code: 0 done, 17 stopped after saving.

    Every process of a run calls it; process 0 alone writes, except for checkpoints, of which each writes its part.
    """
    distributed.compare("settings", run_folder.settings(run_dir, config))
    setup = with_teacher(make_setup(config))
    shape = config.mesh.shape(jax.device_count())
    mesh = make_mesh(shape)
    config.validate_mesh(row_shards(mesh), shape)
    examples = load_examples(setup, "train", config.task.train_file)
    validation = load_examples(setup, "validation", config.task.validation_file)
    test = load_examples(setup, "test", config.task.test_file) if config.evaluation.test else []
    data = encoded(examples, setup)
    check_start(config)
    if distributed.count() > 1:
        if config.rollout.accumulation > 1 and jax.local_device_count() > 1 and jax.default_backend() == "cpu":
            distributed.say(
                "warning: with rollout.accumulation above 1, several processes of several CPU devices each may wait for each "
                "other for ever; set JAX_NUM_CPU_DEVICES=1"
            )
        held_out = [(e.prompt, e.truth, e.features) for e in (*validation, *test)]
        read = {"training": distributed.fingerprint(data), "held-out": distributed.fingerprint(held_out)}
        distributed.compare("data", {f"its {name} data": found for name, found in read.items()})
    run_folder.claim_together(run_dir, config)
    with jax.set_mesh(mesh), Watchdog(config.run.watchdog) as watchdog, host_grader(setup) as grader:
        evaluators = Evaluator(setup, validation, mesh, grader), Evaluator(setup, test, mesh, grader) if test else None
        return _Run(setup, mesh, run_dir, examples, data, *evaluators, watchdog, grader).go()


class _Run:
    """One process's pass through a run."""

    def __init__(
        self, setup: Setup, mesh, run_dir: Path, examples, data, validation, test: Evaluator | None, watchdog: Watchdog,
        grader: HostGrader | None,
    ):  # fmt: skip
        self.setup, self.config, self.mesh, self.run_dir = setup, setup.config, mesh, run_dir
        self.examples, self.validation, self.test, self.watchdog = examples, validation, test, watchdog
        self.batches = Batches(
            data, self.config.rollout.prompts, self.config.run.seed, self.config.rollout.prompt_buckets
        )
        self.grader = grader
        self.compiled: dict[int, Cycle] = {}
        self.compile_seconds = 0.0
        self.stop = False
        self.validated: dict[str, Any] | None = None  # the newest validation's result
        self.alarms = Alarms()

    def go(self) -> int:
        self.best = self.config.evaluation.select == "best"
        self.checkpoints = Checkpoints(self.run_dir, self.config.checkpoint, best=self.best)
        state, done, self.seconds = self._start()
        self.started = time.monotonic()
        lines = JsonLines if distributed.is_main() else NoLines
        self.metrics = lines(self.run_dir / "metrics.jsonl", done)
        self.samples = lines(self.run_dir / "samples.jsonl", done)
        logging = self.config.logging if distributed.is_main() else LoggingConfig()
        self.loggers = Loggers(logging, self.run_dir, dataclasses.asdict(self.config), done)
        previous = signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            with distributed.ending_together():
                if self.saved is None:
                    # Saving finds a folder that cannot be written before hours are spent.
                    self._save(0, state, self._evaluate_before(state))
                state, done = self._cycles(state, done)
                if done == self.config.run.cycles and not distributed.decide("finished", self._finished()):
                    self._finish(state)
        finally:
            self.metrics.close()
            self.samples.close()
            self.checkpoints.close()
            self.loggers.close()  # last, as it may wait for a network
            signal.signal(signal.SIGTERM, previous)  # only now is everything written
        if done < self.config.run.cycles:
            distributed.say(f"stopped after cycle {done}, saved; run the same command to go on")
            return PREEMPTED
        return 0

    def _finished(self) -> bool:
        path = self.run_dir / "summary.json"
        if not path.exists():
            return False
        summary = read_json(path, RESTORE)
        return summary.get("cycles") == self.config.run.cycles  # a run made longer has more to say

    def _on_sigterm(self, *_) -> None:
        self.stop = True

    def _start(self) -> tuple[State, int, float]:
        self.saved = self.checkpoints.latest  # cycles in the newest checkpoint
        distributed.compare("start", {"the newest checkpoint": self.saved})
        resumes, adapted = self.saved is not None, self.config.lora.rank > 0
        base, params = initial_policy(self.setup, self.mesh) if adapted or not resumes else (None, None)
        state = fresh_state(self.setup, self.mesh, params, base, load_teacher(self.setup, self.mesh))
        if self.config.rollout.staleness:
            state = state.replace(replay=empty_replay(state, place(self.batches[0], self.mesh), self.setup))
        self.frozen = {
            name: int(digest(tree)) for name in ("base", "teacher") if (tree := getattr(state, name)) is not None
        }
        self.trained = sum(x.size for x in jax.tree.leaves(state.params))
        if not resumes:
            count = f"{count_params(self.setup.model):,} parameters"
            count += f" in {self.config.model.base}, {self.trained:,} in adapters" if adapted else ""
            distributed.say(f"{count}, mesh {self.mesh.shape}")
            return state, 0, 0.0
        state, meta = self.checkpoints.restore(state)
        for name, source in (("base", "model.pretrained or run.start_from"), ("teacher", "objective.teacher")):
            if meta.get(name) != self.frozen.get(name):
                raise UserError(
                    f"{self.run_dir}: belongs to other {name} weights than those that {source} now holds; put the former "
                    "ones back"
                )
        distributed.say(f"resuming after cycle {meta['cycle']}")
        return state, meta["cycle"], meta["seconds"]

    def _cycles(self, state: State, done: int) -> tuple[State, int]:
        total, rows = self.config.run.cycles, self.config.rollout.prompts * self.config.rollout.group
        unit = "completions" if self.setup.objective.ROLLOUT else "examples"
        self.progress = Progress(total, rows, unit)
        pending: tuple[int, Record] | None = None
        self.clock = time.monotonic()
        with jax.transfer_guard("disallow"):
            while done < total and not distributed.any_of(f"stop/{done}", self.stop):
                state, record = self._dispatch(state, done)
                done += 1
                if pending:  # read the cycle before, while the devices work on this one
                    self._log(*pending)
                pending = (done, record)
                evaluate = done == total or (self.config.evaluation.every and done % self.config.evaluation.every == 0)
                save = done == total or done % self.config.checkpoint.every == 0 or (evaluate and self.best)
                if evaluate or save:
                    self._log(*pending, validate=state if evaluate else None)
                    pending = None
                if save:
                    self._save(done, state, self.validated if evaluate else None)
        if pending:
            self._log(*pending)
        if self.saved != done:
            self._save(done, state)
        return state, done

    def _rollout_number(self, number: int) -> int:
        return number // (1 + self.config.rollout.staleness)

    def _dispatch(self, state: State, number: int) -> tuple[State, Record]:
        host_batch = self.batches[self._rollout_number(number)]
        batch = place(host_batch, self.mesh)
        width = batch.prompts.tokens.shape[1]
        if width not in self.compiled:
            start = time.monotonic()
            self.compiled[width] = self._compile(state, batch)
            self.compile_seconds += time.monotonic() - start
            self.clock = time.monotonic()
            self.watchdog.done("a compilation")
        return self.compiled[width](state, batch, host_batch.features, number)

    def _compile(self, state: State, batch: Batch) -> Cycle:
        if self.grader and self.setup.objective.ROLLOUT:
            return compile_host_cycle(self.setup, self.mesh, self.grader, state, batch)
        program = jax.jit(make_cycle(self.setup), donate_argnums=0).lower(state, batch).compile()
        return lambda state, batch, features, number: program(state, batch)

    def _log(self, cycle: int, record: Record, validate: State | None = None) -> None:
        metrics = {name: float(value) for name, value in jax.device_get(record.metrics).items()}
        seconds = time.monotonic() - self.clock  # since the cycle before was done
        self.watchdog.done(f"cycle {cycle}")
        watched = {name: metrics[name] for name in ("loss", "grad_norm", "param_norm")}
        if not all(map(math.isfinite, watched.values())):
            self.metrics.flush()
            raise FloatingPointError(
                f"cycle {cycle}: {watched}; the newest checkpoint in {self.run_dir} is from before it. In a new run "
                "folder, lower optimizer.learning_rate or raise objective.alpha"
            )
        rows, length = np.prod(record.completion.shape[:2]), record.completion.shape[2]
        tokens = rows * metrics.get("completion_length", length)
        entry = {"cycle": cycle, "updates": cycle * self.config.objective.updates, **metrics}
        entry |= {
            "time/cycle_s": seconds,
            "time/compile_s": self.compile_seconds,
            "tokens_per_second": tokens / seconds,
        }
        if validate is not None:
            entry |= self._validate(validate)
        if distributed.is_main():
            self._write(cycle, entry, record)
        self.clock = time.monotonic()

    def _write(self, cycle: int, entry: dict[str, Any], record: Record) -> None:
        self.metrics.write(entry)
        self.loggers.write(cycle, entry)
        self.progress.show(cycle, entry)
        if self.setup.objective.ROLLOUT:
            for warning in self.alarms.check(entry, jax.device_get(record.completion)):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        every = self.config.run.samples_every
        if self.setup.objective.ROLLOUT and every and (cycle % every == 0 or cycle == 1):
            self._write_samples(cycle, record)

    def _write_samples(self, cycle: int, record: Record, most: int = 8) -> None:
        record = jax.device_get(record)
        for p, number in enumerate(self.batches.index(self._rollout_number(cycle - 1))[:most]):
            example = self.examples[number]
            entry = {"cycle": cycle, "prompt": example.prompt, "truth": example.truth}
            entry["completion"] = self.setup.tokenizer.decode(record.completion[p, 0])
            self.samples.write(entry | {name: float(value[p, 0]) for name, value in record.components.items()})

    def _policy(self, state: State) -> Any:
        return policy_of(state.params, state.base, self.config.lora)

    def _evaluate(self, examples: Evaluator, state: State) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return examples.run(self._policy(state), lambda: self.watchdog.done("a batch of an evaluation"))

    def _validate(self, state: State) -> dict[str, float]:
        with jax.transfer_guard("allow"):
            self.validated, _ = self._evaluate(self.validation, state)
        return {"eval/accuracy": self.validated["accuracy"], "eval/exact": self.validated["exact"]}

    def _save(self, cycle: int, state: State, validation: dict[str, Any] | None = None) -> None:
        self.metrics.flush()
        self.samples.flush()
        seconds = self.seconds + time.monotonic() - self.started
        meta = {"cycle": cycle, "seconds": seconds, "config": self.config.to_toml(), "digest": self.config.digest()}
        meta |= self.frozen
        with jax.transfer_guard("allow"):
            known = validation and {name: validation[name] for name in ("exact", "accuracy")}
            self.checkpoints.save(cycle, state, meta, known if self.best else None)
        self.saved, self.clock = cycle, time.monotonic()
        self.watchdog.done("a save")

    def _evaluate_before(self, state: State) -> dict[str, Any]:
        validation, _ = self._evaluate(self.validation, state)
        before = {"validation_before": validation}
        distributed.say(f"before: validation exact {validation['exact']:.3f}, accuracy {validation['accuracy']:.3f}")
        if self.test:
            before["test_before"], items = self._evaluate(self.test, state)
        if distributed.is_main():
            if self.test:
                write_items(self.run_dir / "eval" / "before.jsonl", items)
            write_text(self.run_dir / "eval" / "before.json", json.dumps(before, indent=1))
        return validation

    def _finish(self, state: State) -> None:
        selected = self.checkpoints.selected
        if selected != self.config.run.cycles:
            distributed.say(f"best validation: after cycle {selected}")
            place = jax.tree.map(lambda x: x.sharding, state.params)
            state = state.replace(params=self.checkpoints.restore_params(state.params, place))
            self.validated = None  # it was that of the last cycle
        after = {"validation_after": self.validated or self._evaluate(self.validation, state)[0]}
        if self.test:
            after["test_after"], items = self._evaluate(self.test, state)
        if not distributed.is_main():
            return
        before = read_json(self.run_dir / "eval" / "before.json", RESTORE)
        summary: dict[str, Any] = {
            "status": "done",
            "cycles": self.config.run.cycles,
            "selected_cycle": selected,
            "updates": self.config.run.cycles * self.config.objective.updates,
            "seconds": self.seconds + time.monotonic() - self.started,
            "compile_seconds": self.compile_seconds,
            "compilations": len(self.compiled),
            "parameters": count_params(self.setup.model),
            "trained_parameters": self.trained,
            "mesh": dict(self.mesh.shape),
            "config_digest": self.config.digest(),
            "versions": {name: importlib.metadata.version(name) for name in ("dmpo_jax", "jax", "optax", "numpy")},
            **before,
            **after,
        }
        if self.test:
            write_items(self.run_dir / "eval" / "after.jsonl", items)
        write_text(self.run_dir / "summary.json", json.dumps(summary, indent=1))
        shown = "test" if self.test else "validation"
        first, last = summary[f"{shown}_before"], summary[f"{shown}_after"]
        print(
            f"{shown}: exact {first['exact']:.3f} -> {last['exact']:.3f} "
            f"[{last['exact_ci95'][0]:.3f}, {last['exact_ci95'][1]:.3f}], "
            f"accuracy {first['accuracy']:.3f} -> {last['accuracy']:.3f}, n = {last['n']}; {self.run_dir / 'summary.json'}",
            flush=True,
        )
