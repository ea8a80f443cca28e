"""The lists of runs, the recipes they name, the published numbers and what a dry run says; nothing is started."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from dmpo_jax.config import load_config, resolve
from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.command import EVAL_SETTINGS, check_settings
from dmpo_jax.model.parameters import count_params
from dmpo_jax.parallel.mesh import make_mesh
from dmpo_jax.planning.programs import abstract_batch, abstract_state
from dmpo_jax.reproduction import estimate, refresh
from dmpo_jax.reproduction.__main__ import main
from dmpo_jax.reproduction.manifest import read_manifest
from dmpo_jax.reproduction.published import read_published
from dmpo_jax.reproduction.reading import as_options, filled
from dmpo_jax.reproduction.steps import Wanted, select, steps_of
from dmpo_jax.reproduction.targets import TARGETS, make_target
from dmpo_jax.training.cycle import make_cycle
from dmpo_jax.training.setup import make_setup

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
LARGE = read_manifest(ROOT / "configs" / "reproduce" / "8b.toml")
SMALL = read_manifest(ROOT / "configs" / "reproduce" / "small.toml")
PUBLISHED = read_published(ROOT / "configs" / "published")
TRAINED = [run for run in LARGE.runs if run.kind == "train"]
DATA_FILES = sorted(path for name in ("published", "reproduce") for path in (ROOT / "configs" / name).glob("*.toml"))


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    for key in ("JAX_NUM_CPU_DEVICES", "DMPO", "GKE_IMAGE", "GKE_BUCKET", "TPU_BUCKET"):
        monkeypatch.delenv(key, raising=False)


def per_length(row, task, lengths=("128", "256", "512")):
    """The numbers of a published row at these lengths; None where it has none."""
    return [row.values.get((task, length)) for length in lengths]


# ---- the lists


def test_the_small_list_trains_every_method_and_the_variants_of_the_claims():
    methods = ["dmpo", "wddo", "diffu_grpo", "coupled_grpo", "wd1", "spg", "gdpo", "espo", "agrpo", "tracerl", "topd"]
    variants = ["none", "group", "individual", "reuse24", "reuse24+group", "reuse24+none", "soft", "soft+none", "dual"]
    trained = [run.name for run in SMALL.runs if run.kind == "train"]
    assert set(trained) == {"pretrain", "teacher", *methods, *(f"dmpo+{name}" for name in variants)}
    assert SMALL.seeds == (0, 1, 2) and [run.name for run in SMALL.runs if run.kind == "bench"] == [
        "bench-full",
        "bench-dual",
    ]
    settings = dict(SMALL.run("dmpo+reuse24+none").settings)
    assert settings == {"run.start_from": "{pretrain}", "objective.updates": 24, "objective.baseline": "none"}
    rollouts = {
        load_config(run.config).run.cycles for run in SMALL.runs if run.kind == "train" and "pretrain" in run.needs
    }
    assert rollouts == {16}  # one budget for all
    assert {claim.kind for claim in SMALL.claims} == {"baseline", "reuse", "cache"}


def test_the_large_list_has_a_line_for_every_method_of_the_tables_on_four_tasks():
    lines = {(run.model, run.method) for run in LARGE.runs}
    for method in ["base", "diffu_grpo", "coupled_grpo", "wd1", "spg", "gdpo", "espo", "agrpo", "dmpo"]:
        assert ("llada_8b", method) in lines
    assert {("llada_1_5", "base"), ("llada_1_5", "dmpo"), ("dream_7b", "dmpo"), ("dream_7b", "diffu_grpo")} <= lines
    for line in lines:
        tasks = {run.task for run in LARGE.runs if (run.model, run.method) == line}
        assert tasks == {"gsm8k", "math", "countdown", "sudoku"}
    assert all(protocol.lengths == (128, 256, 512) for protocol in LARGE.protocols.values())
    assert {kind.topology for kind in LARGE.hardware.values()} == {"v5e:4x4", "v5p:2x2x1", "v6e:2x4", "h100:8"}


BAD = {
    "unknown key": ("run = [{name = 'a', confg = 'x'}]", ["config is missing"]),
    "another unknown key": ("run = [{name = 'a', config = 'x', need = []}]", ["need: no such key", "did you mean needs"]),
    "unknown need": ("run = [{name = 'ab', config = 'x'}, {name = 'b', config = 'x', needs = ['abc']}]", ["ab"]),
    "later need": ("run = [{name = 'a', config = 'x', needs = ['b']}, {name = 'b', config = 'x'}]", ["before"]),
    "place without need": ("run = [{name = 'a', config = 'x', set.run.start_from = '{b}'}]", ["{b}"]),
    "twice": ("run = [{name = 'a', config = 'x'}, {name = 'a', config = 'y'}]", ["two of that name"]),
    "an option as name": ("run = [{name = '--help', config = 'x'}]", ["expected letters"]),
    "kind": ("run = [{name = 'a', config = 'x', kind = 'trian'}]", ["did you mean train"]),
    "none": ("", ["names no runs"]),
    "model": ("row = [{model = 'llada', method = 'm', tasks = [], protocols = []}]", ["'llada' is not known"]),
    "setting": ("run = [{name = 'a', config = 'x', set.run = 3}]", ["expected section.key = value"]),
    "claim": ("run = [{name = 'a', config = 'x'}]\nclaim = [{kind = 'b', text = '', source = '', runs = []}]", ["'b'"]),
    "claim of one run": (
        "run = [{name = 'a', config = 'x'}]\nclaim = [{kind = 'reuse', text = '', source = '', runs = ['a']}]", ["two runs"]
    ),
    "share": ("share_of_peak = 1.5\nrun = [{name = 'a', config = 'x'}]", ["share_of_peak = 1.5"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_list_that_is_wrong_is_refused_in_one_line(name, tmp_path):
    body, words = BAD[name]
    path = tmp_path / "list.toml"
    path.write_text(f"out = 'o'\nseeds = [0]\nseeded = ['run.seed']\n{body}\n")
    with pytest.raises(UserError) as error:
        read_manifest(path)
    text = str(error.value)
    assert "\n" not in text and str(path) in text and all(word in text for word in words), text


def test_a_run_is_chosen_with_what_it_needs():
    assert [run.name for run in select(SMALL, ["topd"])] == ["pretrain", "teacher", "topd"]
    names = [run.name for run in select(SMALL, ["*none", "bench-d*"])]
    assert names == ["pretrain", "dmpo+none", "dmpo+reuse24+none", "dmpo+soft+none", "bench-dual"]
    with pytest.raises(UserError, match=r"--only dmpoo: matches no run.*did you mean dmpo\?"):
        select(SMALL, ["dmpoo"])


def test_settings_are_filled_in_and_written_as_toml():
    given = (("a.b", "{length}"), ("a.c", "x {first} y"), ("a.d", [1, 2]), ("a.e", True), ("a.f", 3e-6))
    found = filled(given, {"length": 64, "first": "out/first-0"})
    assert found == (("a.b", 64), ("a.c", "x out/first-0 y"), ("a.d", [1, 2]), ("a.e", True), ("a.f", 3e-6))
    options = as_options(found)
    assert options[1::2] == ["a.b=64", 'a.c="x out/first-0 y"', "a.d=[1, 2]", "a.e=true", "a.f=3e-06"]
    assert [tomllib.loads(option) for option in options[1::2]] == [{"a": {key[2:]: value}} for key, value in found]


# ---- recipes


@pytest.mark.parametrize("run", [run for run in LARGE.runs if run.kind == "train"], ids=lambda run: run.name)
def test_recipes_are_valid_and_divide_over_every_hardware(run):
    config = load_config(run.config)
    assert (config.task.name, config.objective.name) == (run.task, run.method)
    assert not config.model.pretrained and not config.evaluation.test
    sizes = {"llada_8b": 8_015_581_184, "llada_1_5": 8_015_581_184, "dream_7b": 7_615_616_512}
    assert count_params(config.model) == sizes[run.model]
    for kind in LARGE.hardware.values():
        data, fsdp, _ = estimate.mesh_of(kind)
        config.validate_mesh(data * fsdp, estimate.mesh_of(kind))


@pytest.mark.parametrize("run", LARGE.runs, ids=lambda run: run.name)
def test_evaluations_are_valid_and_read_no_setting_in_vain(run):
    target = make_target("local", LARGE.hardware["h100-8"], {}, True)
    wanted = Wanted(Path("out"), (0,), (run.name,), "files", LARGE.hardware["h100-8"].mesh)
    steps = [step for step in steps_of(LARGE, wanted, target) if step.kind == "eval"]
    assert len(steps) == 3 * len(run.protocols) and run.protocols
    for step in steps:
        overrides = list(step.command[step.command.index("--set") + 1 :: 2])
        config = load_config(run.config, overrides)
        options = ["--model"] if run.kind == "weights" else ["--run-dir"]
        check_settings(config, overrides, "eval", EVAL_SETTINGS, options)
        length = config.evaluation.completion_length
        assert step.done.name.endswith(f"-{length}.json") and config.evaluation_sampler.cache == "none"
        assert config.evaluation_sampler.steps == (length if "full" in step.name else length // 2)
        assert config.task.test_file.startswith("files/")


@pytest.mark.parametrize("run", TRAINED, ids=lambda run: run.name)
def test_heads_of_recipes_say_command_hardware_hours_and_the_published_score(run):
    text = Path(run.config).read_text(encoding="utf-8")
    assert f"# Command: launch/reproduce --scale 8b --only {run.name}\n" in text and "\n# Hardware: " in text
    plans = estimate.read_plans(ROOT / "configs" / "reproduce" / "plan.json")
    assert f"{refresh.hours_line(LARGE, load_config(run.config), plans)}\n" in text
    quoted = re.findall(r"^# (?:Expected:|         ) ([\d. /]+) % at ([\d /]+) tokens \((\w+)", text, re.MULTILINE)
    assert "\n# Expected: " in text
    rows = PUBLISHED.rows(LARGE.models[run.model].title, run.method)
    for numbers, lengths, paper in quoted:
        wanted = [float(number) for number in numbers.split(" / ")]
        assert any(
            table.paper == paper and per_length(row, run.task, lengths.split(" / ")) == wanted for table, row in rows
        )
    printed = any(table.paper == "DMPO" and (run.task, "256") in row.values for table, row in rows)
    assert bool(quoted) or not printed


def test_what_the_papers_set_differently_by_task():
    settings = lambda name: load_config(LARGE.run(name).config)  # noqa: E731
    assert settings("llada_8b-dmpo-gsm8k").objective.baseline == "group"
    assert settings("llada_8b-dmpo-countdown").objective.baseline == "individual"
    assert settings("llada_1_5-dmpo-gsm8k").objective.baseline == "individual"
    dmpo = settings("llada_8b-dmpo-sudoku")
    assert (dmpo.rollout.prompts, dmpo.rollout.group, dmpo.objective.updates, dmpo.optimizer.learning_rate) == (
        8,
        16,
        8,
        3e-6,
    )
    assert dmpo.run.cycles * dmpo.objective.updates == 4000 and dmpo.model.base == "nf4" and dmpo.lora.rank == 128
    espo = [settings(f"llada_8b-espo-{task}") for task in ("gsm8k", "math", "countdown", "sudoku")]
    assert [c.objective.beta for c in espo] == [1e-3, 1e-3, 3e-3, 1e-2] and [c.rollout.group for c in espo] == [
        6,
        16,
        6,
        6,
    ]
    assert [c.objective.epsilon for c in espo] == [0.2, 0.2, 0.0, 0.2] and [c.sampler.steps for c in espo] == [
        256,
        256,
        128,
        128,
    ]
    d1 = [settings(f"llada_8b-diffu_grpo-{task}") for task in ("gsm8k", "math", "countdown", "sudoku")]
    assert [c.run.cycles * c.objective.updates for c in d1] == [7704, 6600, 5000, 3800]
    assert settings("llada_8b-spg-sudoku").objective.beta == 1.0 and settings("llada_8b-spg-math").objective.beta == 1.5


def _traced(run):
    setup = make_setup(refresh.planned_as(load_config(run.config)))
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    with jax.set_mesh(mesh):
        batch = abstract_batch(setup, mesh)
        state = abstract_state(setup, batch, mesh)
        after, record = jax.eval_shape(make_cycle(setup), state, batch)
    return setup.config, state, after, record


@pytest.mark.slow
@pytest.mark.parametrize("run", TRAINED, ids=lambda run: run.name)
def test_one_cycle_of_every_recipe_is_traced(run):
    config, state, after, record = _traced(run)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]  # noqa: E731
    assert shapes(after) == shapes(state)
    rollout = config.rollout
    assert record.completion.shape == (rollout.prompts, rollout.group, rollout.completion_length)
    assert all(value.shape == () for value in record.metrics.values())


# ---- published numbers, as their sources print them


@pytest.mark.parametrize(
    ("paper", "number", "row", "task", "values"),
    [
        ("DMPO", "Table 1", "DMPO", "countdown", [67.19, 80.86, 82.81]),
        ("DMPO", "Table 1", "DMPO", "sudoku", [32.76, 63.80, 56.67]),
        ("DMPO", "Table 1", "LLaDA-8B-Instruct", "countdown", [23.44, 14.45, 14.84]),
        ("DMPO", "Table 1", "wd1", "sudoku", [None, 22.04, 24.65]),
        ("DMPO", "Table 1", "DMPO-LLaDA-1.5", "math", [30.20, 36.60, 41.00]),
        ("DMPO", "Table 2", "DMPO-Dream", "gsm8k", [None, 84.03, 84.76]),
        ("d1", "Table 1", "LLaDA-8B-Instruct", "sudoku", [11.7, 6.7, 5.5]),
        ("d1", "Table 1, without fine-tuning", "diffu-GRPO", "gsm8k", [None, 79.8, None]),
        ("wd1", "main table", "wd1", "sudoku", [None, 76.4, 62.8]),
        ("wd1", "ablation", "wd1", "sudoku", [None, 25.2, 24.2]),
        ("SPG", "main table", "SPG", "sudoku_spg", [82.9, 94.0, 93.1]),
        ("GDPO", "best variant", "SFT + GDPO", "math", [33.2, 39.6, 41.4]),
        ("EGSPO", "main table", "EGSPO-SA", "countdown", [78.5, 77.3, 76.5]),
        ("RSPO", "main table", "TraceRL", "countdown", [None, 50.4, 52.6]),
        ("MAPG", "main table", "MAPG", "gsm8k", [81.0, 85.9, 87.1]),
        ("MMaDA", "UniGRPO", "UniGRPO", "sudoku_spg", [59.0, 67.0, 62.9]),
    ],
)
def test_published_numbers(paper, number, row, task, values):
    (found,) = (r for t in PUBLISHED.tables if (t.paper, t.number) == (paper, number) for r in t.rows if r.name == row)
    assert per_length(found, task) == values


def test_other_published_numbers_claims_and_notes():
    def value(paper, number, row, task, length):
        tables = (t for t in PUBLISHED.tables if (t.paper, t.number) == (paper, number))
        return next(r for t in tables for r in t.rows if r.name == row).values[task, length]

    assert value("DARE", "comparison on LLaDA", "coupled-GRPO", "countdown", "unstated") == 77.9
    assert value("TOPD", "Table 1", "SDAR-4B + TOPD", "math", "dynamic") == 71.9
    assert value("ESPO", "LLaDA, mean of the lengths", "ESPO", "sudoku", "mean") == 86.0
    assert value("DPRM", "mean pass@K", "DMPO", "countdown_2_to_6", "unstated") == 7.8
    wrong = [claim for claim in PUBLISHED.claims if claim.verdict.startswith("wrong")]
    assert len(wrong) == 2 and "+67.97" in wrong[0].quoted and "82.81 - 14.84" in wrong[0].found
    assert any("24.56" in note.text and "63.80" in note.text for note in PUBLISHED.notes)
    assert not [t for t, _ in PUBLISHED.rows("LLaDA-8B-Instruct", "dmpo") if t.paper == "DPRM"]  # another metric


def test_gains_that_the_claims_state_follow_from_the_table():
    table = next(t for t in PUBLISHED.tables if (t.paper, t.number) == ("DMPO", "Table 1"))
    rows = {row.name: row for row in table.rows}
    of = lambda name, task: per_length(rows[name], task)  # noqa: E731
    assert round(of("DMPO", "countdown")[2] - of("LLaDA-8B-Instruct", "countdown")[2], 2) == 67.97
    assert round(of("DMPO", "sudoku")[1] - of("GDPO", "sudoku")[1], 2) == 39.63
    assert round(of("DMPO", "countdown")[2] - of("GDPO", "countdown")[2], 2) == 16.40


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("name = 'x'\nmodel = 'm'\nmethod = 'a'\ngsm8k = {256 = 101}", "expected percent"),
        ("name = 'x'\nmodel = 'm'\nmethod = 'a'\ngsm8k = {64 = 1}", "'64' is not known"),
        ("name = 'x'\nmodel = 'm'\nmethod = 'a'\ngsm9k = {256 = 1}", "gsm9k: no such key; did you mean gsm8k"),
        ("name = 'x'\nmodel = 'm'\nmethod = 'a'", "has no number"),
        ("name = 'x'\nmodel = 'm'\nmethod = 'a'\nstart = 'stf'\nmath = {256 = 1}", "did you mean sft"),
    ],
)
def test_a_published_row_that_is_wrong_is_refused(row, words, tmp_path):
    (tmp_path / "p.toml").write_text(f"paper = 'p'\narxiv = '1'\n[[table]]\nnumber = '1'\n[[table.row]]\n{row}\n")
    with pytest.raises(UserError, match=re.escape(words)):
        read_published(tmp_path)


@pytest.mark.parametrize("path", DATA_FILES, ids=lambda path: path.stem)
def test_data_files_say_what_they_are(path):
    assert path.read_text(encoding="utf-8").startswith("# ")


# ---- hours and memory


def plan_for(config, **changes):
    shape = estimate.digest_of(estimate.shape_of(config))
    plan = estimate.Plan(
        shape, "v5p:2x2x1", (1, 4, 1), "quick", "0", updates=8, fits=True, peak=40e9, limit=100e9,
        seconds={"sample": 8.0, "prepare": 4.0, "update": 48.0},
    )  # fmt: skip
    return dataclasses.replace(plan, **changes)


def test_hours_are_cycles_times_roofline_over_the_assumed_share():
    config = load_config("configs/llada_8b/dmpo_gsm8k.toml")
    v5p, v6e = LARGE.hardware["v5p-8"], LARGE.hardware["v6e-8"]
    found = estimate.estimate([plan_for(config)], config, v5p, 0.4)
    assert found.hours == pytest.approx(500 * 60 / 0.4 / 3600) and (found.peak_gb, found.limit_gb) == (40, 100)
    assert estimate.shown(found) == "21 h, 40.0 of 100.0 GB"
    assert estimate.shown(estimate.estimate([plan_for(config)], config, v6e, 0.4)) == "not planned yet"
    full = estimate.estimate([plan_for(config, fits=False, seconds=None, peak=120e9)], config, v5p, 0.4)
    assert full.hours is None and estimate.shown(full) == "does not fit: 120.0 of 100.0 GB"
    assert "estimated from the plan at 40% of peak: v5p-8 21 h" in refresh.hours_line(LARGE, config, [plan_for(config)])


def test_more_updates_take_longer_and_values_that_shape_nothing_do_not_count():
    config = load_config("configs/llada_8b/dmpo_gsm8k.toml")
    longer = load_config("configs/llada_8b/dmpo_gsm8k.toml", ["objective.updates=16", "optimizer.learning_rate=1e-5"])
    found = estimate.estimate([plan_for(config)], longer, LARGE.hardware["v5p-8"], 1.0)
    assert found.hours == pytest.approx(500 * (12 + 2 * 48) / 3600)
    same = load_config("configs/llada_8b/dmpo_gsm8k.toml", ["objective.alpha=0.5", "sampler.temperature=0.7"])
    assert estimate.shape_of(same) == estimate.shape_of(config)
    for change in (
        "rollout.group=8",
        "sampler.steps=64",
        "sampler.temperature=0",
        "model.base=int8",
        "objective.masks=2",
    ):
        assert estimate.shape_of(load_config("configs/llada_8b/dmpo_gsm8k.toml", [change])) != estimate.shape_of(config)


def test_the_kept_plan_is_that_of_llada_8b_and_is_read_strictly(tmp_path):
    kept = ROOT / "configs" / "reproduce" / "plan.json"
    shape = estimate.digest_of(estimate.shape_of(load_config("configs/llada_8b.toml")))
    (plan,) = (p for p in estimate.read_plans(kept) if (p.shape, p.topology) == (shape, "v5p:2x2x1"))
    assert plan.peak == 42361227520
    assert plan.cycle_seconds(8) == pytest.approx(60.82, abs=0.01) and plan.fits
    for change, words in (
        ({"shapes": {"x": {}}, "plans": []}, "is not the digest"),
        ({"shapes": {}, "plans": json.loads(kept.read_text())["plans"]}, "no such shape"),
        ({"shapes": {}, "plans": [], "more": 1}, "more: no such key"),
        ({"plans": []}, "shapes is missing"),
    ):
        (tmp_path / "plan.json").write_text(json.dumps(change))
        with pytest.raises(UserError, match=words):
            estimate.read_plans(tmp_path / "plan.json")


def test_refreshing_plans_what_is_missing_and_writes_the_hours(tmp_path):
    """With a stand-in for `dmpo plan` that says what the kept plan was made of."""
    config = load_config("configs/llada_8b/dmpo_gsm8k.toml")
    program = {"fits": True, "peak": 40e9, "roofline": {"sample": 8.0, "update": 48.0}}
    found = {"topology": "v5p:2x2x1", "mesh": {"data": 1, "fsdp": 4, "model": 1}, "effort": "quick", "jax": "0"}
    found |= {"memory_limit": 100e9, "programs": {"rollout": program | {"peak": 50e9}, "cycle": program}}
    (tmp_path / "found.json").write_text(json.dumps([found]))
    stub = tmp_path / "dmpo"
    stub.write_text(
        f'#!/bin/bash\necho "$*" >>{tmp_path}/calls\ncp "$2" {tmp_path}/planned.toml\nwhile [ "$1" != --out ]; do shift; done\n'
        f'cp {tmp_path}/found.json "$2"\n'
    )
    stub.chmod(0o755)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'# A recipe.\n# Hours: not planned yet\nextends = "{ROOT}/configs/llada_8b/dmpo_gsm8k.toml"\n')
    run = dataclasses.replace(LARGE.run("llada_8b-dmpo-gsm8k"), config=str(recipe))
    plans = tmp_path / "plan.json"
    plans.write_text('{"shapes": {}, "plans": []}')
    for _ in range(2):  # the second time there is nothing to plan
        assert refresh.refresh(LARGE, [run], ["v5p-8"], plans, [str(stub)], print) == {}
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--quick --cycle-only --topology v5p:2x2x1" in call and "--set mesh.fsdp=4" in call
    planned = resolve(tomllib.loads((tmp_path / "planned.toml").read_text()))
    assert planned.task.name == "sudoku" and estimate.shape_of(planned) == estimate.shape_of(config)
    (plan,) = estimate.read_plans(plans)
    assert (plan.peak, plan.updates, plan.seconds) == (50e9, 8, {"sample": 8.0, "update": 48.0})
    assert "# Hours: estimated from the plan at 40% of peak: v5p-8 19 h, 50.0 of 100.0 GB\n" in recipe.read_text()
    stub.write_text("#!/bin/bash\necho no compiler >&2\nexit 2\n")
    failed = refresh.refresh(LARGE, [run], ["v6e-8"], plans, [str(stub)], print)
    assert "code 2: no compiler" in failed["llada_8b-dmpo-gsm8k on v6e-8"]


# ---- dry runs

DRY_RUNS = {
    "reproduce-small": ["--scale", "small", "--only", "dmpo+dual", "--only", "bench-dual", "--seeds", "2"],
    "reproduce-8b-local": ["--scale", "8b", "--only", "dream_7b-dmpo-math", "--only", "llada_1_5-base-sudoku"],
    "reproduce-8b-slurm": ["--scale", "8b", "--target", "slurm", "--only", "llada_8b-spg-sudoku", "--seeds", "0"],
    "reproduce-8b-tpu-vm": [
        "--scale",
        "8b",
        "--target",
        "tpu-vm",
        "--hardware",
        "v6e-8",
        "--only",
        "llada_8b-wd1-gsm8k",
    ],
    "reproduce-8b-gke": [
        "--scale",
        "8b",
        "--target",
        "gke",
        "--only",
        "llada_8b-espo-countdown",
        "--data",
        "/bucket/data",
    ],
}


@pytest.mark.parametrize("name", DRY_RUNS)
def test_dry_runs_print_the_golden_text(name, capsys, tmp_path):
    assert main([*DRY_RUNS[name], "--dry-run", "--out", "runs/none"]) == 0
    text, golden = capsys.readouterr().out, GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert not (ROOT / "runs" / "none").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_dry_run_lists_every_run_of_the_tables(target, capsys):
    assert main(["--scale", "8b", "--target", target, "--dry-run", "--out", "runs/none"]) == 0
    text = capsys.readouterr().out
    for run in TRAINED:
        assert f"\n{run.name}-0: to do, {run.config}\n" in text
    for title in ("v5e-16", "v5p-8", "v6e-8", "8 x H100"):
        assert text.count(f"\n  {title:<8} ") == len(TRAINED)
    assert "an assumed share of the peak" in text


def test_the_small_scale_waits_for_no_jax():
    code = "import sys; from dmpo_jax.reproduction.__main__ import main; "
    code += "main(['--scale', 'small', '--dry-run']); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "pretrain-2" in done.stdout


BAD_USAGE = {
    "no scale": ([], "--scale"),
    "target of small": (["--scale", "small", "--target", "slurm"], "--target belongs to --scale 8b"),
    "hardware": (["--scale", "8b", "--hardware", "v5p-9", "--dry-run"], "did you mean v5p-8"),
    "hardware of another target": (
        ["--scale", "8b", "--target", "tpu-vm", "--hardware", "h100-8", "--dry-run"],
        "8 x H100",
    ),
    "two kinds": (["--scale", "8b", "--hardware", "v5p-8", "--hardware", "v6e-8", "--dry-run"], "expected one"),
    "jobs": (["--scale", "small", "--jobs", "0"], "--jobs 0"),
    "jobs on a slice": (["--scale", "8b", "--target", "tpu-vm", "--jobs", "2"], "--jobs 2"),
    "seeds": (["--scale", "small", "--seeds", "1,x"], "--seeds 1,x"),
    "seed twice": (["--scale", "small", "--seeds", "1,1"], "each once"),
    "large seed": (["--scale", "small", "--seeds", "4294967296"], "4294967295"),
    "only": (["--scale", "small", "--only", "topdd"], "did you mean topd"),
    "no bucket": (["--scale", "8b", "--target", "tpu-vm", "--only", "*-wd1-math"], "TPU_BUCKET is not set"),
    "no image": (["--scale", "8b", "--target", "gke", "--only", "*-wd1-math"], "GKE_IMAGE is not set"),
    "no files": (
        ["--scale", "8b", "--only", "*-wd1-math", "--data", "nowhere"],
        "nowhere/math/train.jsonl: no such file",
    ),
    "no list": (["--scale", "small", "--list", "none.toml"], "none.toml"),
}


@pytest.mark.parametrize("name", BAD_USAGE)
def test_bad_usage_gives_one_line_and_code_2(name, capsys, tmp_path):
    arguments, words = BAD_USAGE[name]
    try:
        code = main([*arguments, "--out", str(tmp_path / "out")])
    except SystemExit as ended:
        code = ended.code
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("reproduce: ") and words in lines[0], lines
    assert not (tmp_path / "out").exists()
