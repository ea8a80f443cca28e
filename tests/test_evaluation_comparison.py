"""Runs of several seeds taken together as one line of a table."""

import csv
import json

import pytest

from dmpo_jax import cli
from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.comparison import recipes, write_tables
from dmpo_jax.evaluation.intervals import newcombe, wilson


def make_run(folder, solved, seed=0, n=200, updates=4, reward=0.5):
    """A finished run folder with so many exact solves before and after."""
    folder.mkdir(parents=True)
    run = f"[run]\nseed = {seed}\ncycles = 2\nstart_from = 'base-{seed}'\n"
    config = f"{run}[task]\nseed = {seed}\n[objective]\nupdates = {updates}\n"
    (folder / "config.toml").write_text(config)
    lines = [{"cycle": c, "reward/mean": reward + c / 10, "loss": 1.0, "time/cycle_s": 1.0 + c} for c in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = lambda exact: {"n": n, "exact": exact / n, "accuracy": 0.9, "accuracy_ci95": [0.8, 1.0]}  # noqa: E731
    summary = {"status": "done", "test_before": result(solved[0]), "test_after": result(solved[1])}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_seeds_of_a_recipe_are_pooled(tmp_path):
    runs = [make_run(tmp_path / f"dmpo-{seed}", (40, 120 + 10 * seed), seed) for seed in (0, 1)]
    runs.append(make_run(tmp_path / "dmpo+more-0", (40, 60), updates=8))
    write_tables(runs, tmp_path / "out")
    lines = list(csv.DictReader((tmp_path / "out" / "tables.csv").open()))
    assert [(line["recipe"], line["runs"], line["seeds"], line["n"]) for line in lines] == [
        ("dmpo", "2", "0 1", "400"),
        ("dmpo+more", "1", "0", "200"),
    ]
    first = {key: float(value) for key, value in lines[0].items() if key not in ("recipe", "seeds")}
    assert (first["exact_before"], first["exact_after"], first["gain"]) == pytest.approx((0.2, 0.625, 0.425))
    assert (first["lowest_run"], first["highest_run"], first["cycle_s"]) == (0.6, 0.65, 2.5)
    assert (first["exact_after_low"], first["exact_after_high"]) == pytest.approx(wilson(250, 400))
    assert (first["gain_low"], first["gain_high"]) == pytest.approx(newcombe(250, 400, 80, 400))
    table = (tmp_path / "out" / "tables.md").read_text()
    assert "| dmpo | 0 1 | 400 | 20.0 | 62.5 [57.7, 67.1] | +42.5 [" in table and "| 2 x 8 |" in table
    assert (tmp_path / "out" / "comparison.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_what_is_not_finished_or_not_readable_is_left_out(tmp_path):
    good, odd, unfinished = (make_run(tmp_path / name, (4, 8)) for name in ("good-0", "odd-0", "unfinished-0"))
    (odd / "config.toml").write_text("[run]\ncycles = ")
    (unfinished / "summary.json").unlink()
    assert [recipe.name for recipe in recipes([good, odd, unfinished])] == ["good"]
    with pytest.raises(UserError, match="--tables: none of these runs is finished"):
        recipes([odd, unfinished])


def test_the_command_writes_the_page_and_the_tables(tmp_path, capsys):
    run = make_run(tmp_path / "dmpo-0", (40, 120))
    assert cli.main(["report", str(run), "--out", str(tmp_path / "r.html"), "--tables", str(tmp_path / "t")]) == 0
    assert "| dmpo | 0 | 200 | 20.0 | 60.0 [" in capsys.readouterr().out and (tmp_path / "r.html").exists()
    (tmp_path / "file").write_text("")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "r.html"), "--tables", str(tmp_path / "file")]) == 2
    assert "--tables" in capsys.readouterr().err
