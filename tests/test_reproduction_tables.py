"""What the reproduction ends in: cells beside published numbers, and verdicts that follow from intervals."""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_evaluation_comparison import make_run

from dmpo_jax.evaluation.comparison import comma_separated, recipes
from dmpo_jax.evaluation.intervals import newcombe, wilson
from dmpo_jax.reproduction import claims
from dmpo_jax.reproduction.__main__ import main
from dmpo_jax.reproduction.document import Table, as_html, markdown
from dmpo_jax.reproduction.large_tables import write_large
from dmpo_jax.reproduction.manifest import Claim, read_manifest
from dmpo_jax.reproduction.published import read_published
from dmpo_jax.reproduction.results import cell_of

ROOT = Path(__file__).parents[1]
LARGE = read_manifest(ROOT / "configs" / "reproduce" / "8b.toml")
PUBLISHED = read_published(ROOT / "configs" / "published")
PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """All tags with their attributes, and the text; every tag must be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data if self.open[-1:] != ["style"] else ""


# ---- tables of any kind


def test_one_table_in_three_forms():
    table = Table("A <title>", ("name", "x"), (("a|b", "1"), ("<b>", "")), notes=("first", "second"))
    text = markdown([table])
    assert text == "## A <title>\n\n| name | x |\n|---|--:|\n| a\\|b | 1 |\n| <b> |  |\n\n- first\n- second\n"
    page = Page(as_html(table))
    assert "b" not in page.tags and "a|b" in page.words and "<b>" in page.words and page.tags.count("tr") == 3
    assert comma_separated(("a", "b"), [{"a": 'x, "y"'}]) == 'a,b\n"x, ""y""",\n'


# ---- claims


def variants(tmp_path, **solved):
    """Recipes by name, each of two seeds with 200 items and so many exact solves before and after."""
    folders = []
    for name, counts in solved.items():
        for seed in (0, 1):
            folders.append(make_run(tmp_path / f"{name}-{seed}", counts, seed=seed, updates=len(folders) // 2 + 1))
    return {recipe.name: recipe for recipe in recipes(folders)}


def claim(kind, bench=()):
    return Claim(kind, "text", "source", ("one", "two"), tuple(bench))


@pytest.mark.parametrize(
    ("kind", "one", "two", "verdict"),
    [
        ("baseline", (40, 120), (40, 42), "shows"),
        ("baseline", (40, 120), (40, 20), "shows"),  # it got worse: nothing was learned
        ("baseline", (40, 120), (40, 100), "does not show"),  # learns without one too
        ("baseline", (40, 44), (40, 42), "does not show"),  # learns with neither
        ("reuse", (40, 120), (40, 118), "shows"),
        ("reuse", (40, 120), (40, 160), "shows"),
        ("reuse", (40, 120), (40, 80), "does not show"),  # learns, but is worse
        ("reuse", (40, 42), (40, 41), "does not show"),  # as good, but learns nothing
        ("cache", (40, 120), (40, 123), "shows"),
        ("cache", (40, 120), (40, 60), "does not show"),
    ],
)
def test_verdicts_follow_from_intervals(kind, one, two, verdict, tmp_path):
    bench = ("full", "dual") if kind == "cache" else ()
    found = claims.judge(claim(kind, bench), variants(tmp_path, one=one, two=two), {"full": 1.0, "dual": 0.5})
    assert found.verdict == verdict and found.items == 400


def test_a_cache_that_saves_no_time_shows_nothing(tmp_path):
    found = variants(tmp_path, one=(40, 120), two=(40, 120))
    slow = claims.judge(claim("cache", ("full", "dual")), found, {"full": 1.0, "dual": 1.1})
    assert slow.verdict == "does not show" and "1.00 s without and 1.10 s with" in slow.figures


def test_figures_of_a_verdict_are_those_of_the_intervals(tmp_path):
    found = claims.judge(claim("baseline"), variants(tmp_path, one=(40, 120), two=(40, 42)), {})
    low, high = newcombe(84, 400, 240, 400)
    gain = newcombe(240, 400, 80, 400)
    assert f"one: gain +40.0 [{100 * gain[0]:+.1f}, {100 * gain[1]:+.1f}] points over 2 seeds" in found.figures
    assert f"difference -39.0 [{100 * low:+.1f}, {100 * high:+.1f}]" in found.figures


def test_what_is_not_there_is_not_run(tmp_path):
    only_one = variants(tmp_path, one=(40, 120))
    assert claims.judge(claim("baseline"), only_one, {}).verdict == "not run"
    both = variants(tmp_path / "more", one=(40, 120), two=(40, 120))
    found = claims.judge(claim("cache", ("full", "dual")), both, {"full": 1.0})
    assert (found.verdict, found.figures) == ("not run", "dual not finished")


# ---- the small scale

SETTINGS = {
    "dmpo": (40, 120),
    "dmpo+none": (40, 41),
    "dmpo+reuse24": (40, 121),
    "dmpo+dual": (40, 119),
    "espo": (40, 90),
}


def small(tmp_path, **changes):
    out = tmp_path / "out"
    for number, (name, solved) in enumerate((SETTINGS | changes).items(), 1):
        for seed in (0, 1, 2):
            make_run(out / f"{name}-{seed}", solved, seed=seed, updates=number)
    (out / "bench-full.json").write_text('{"phases": {"rollout": {"seconds": 2.0}}}')
    (out / "bench-dual.json").write_text('{"phases": {"rollout": {"seconds": 1.0}}}')
    return out


def test_the_small_scale_ends_in_tables_a_figure_and_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = small(tmp_path)
    assert main(["--scale", "small", "--out", str(out), "--tables"]) == 0
    text = (out / "tables.md").read_text()
    assert "| espo | 0 1 2 | 600 | 20.0 | 45.0 [41.1, 49.0] |" in text
    rows = list(csv.DictReader((out / "claims.csv").open()))
    assert [row["verdict"] for row in rows] == ["shows", "not run", "not run", "shows", "shows"]
    assert "dmpo+reuse24+none not finished" in rows[1]["figures"] and "(2.00 times as fast)" in rows[4]["figures"]
    lines = list(csv.DictReader((out / "tables.csv").open()))
    assert {line["recipe"]: line["n"] for line in lines} == dict.fromkeys(SETTINGS, "600")
    assert (
        "Not finished: pretrain, teacher, wddo," in text
        and f"launch/reproduce --scale small --out {out} --tables" in text
    )
    assert (out / "comparison.png").read_bytes()[:8] == PNG and (out / "runs.html").exists()
    page = Page((out / "report.html").read_text())
    sources = [value for key, value in page.attributes if key in ("src", "href")]
    assert all(value.startswith("data:") for value in sources) and page.tags.count("img") == 1
    assert "45.0 [41.1, 49.0]" in page.words and "does not show" not in page.words
    assert str(out / "report.html") in capsys.readouterr().out


def test_with_nothing_finished_there_are_no_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "dmpo-0").mkdir()
    (tmp_path / "dmpo-0" / "metrics.jsonl").write_text('{"cycle": 1, "reward/mean": 0.5}\n')
    assert main(["--scale", "small", "--out", str(tmp_path), "--tables"]) == 0
    assert "no tables" in capsys.readouterr().out and not (tmp_path / "tables.md").exists()


# ---- the large scale


def evaluation(out, name, length, protocol="full", n=256, **figures):
    file = out / "eval" / f"{name}-{protocol}-{length}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"n": n, "completion_length": length, **figures}))


def large(out, seeds=(0,)):
    files = write_large(LARGE, PUBLISHED, out, seeds, ["Command: none"])
    assert [file.name for file in files] == ["tables.md", "tables.csv", "comparison.png", "report.html"]
    return list(csv.DictReader((out / "tables.csv").open()))


def test_cells_pool_the_seeds(tmp_path):
    run = LARGE.run("llada_8b-dmpo-countdown")
    evaluation(tmp_path, f"{run.name}-0", 256, published={"accuracy": 0.75}, accuracy=0.1, exact=0.7)
    evaluation(tmp_path, f"{run.name}-1", 256, published={"accuracy": 0.5}, exact=0.4)
    found = cell_of(LARGE, tmp_path, run, (0, 1, 2), "full", 256, "published")
    assert (found.value, found.items, found.seeds) == (0.625, 512, (0, 1)) and found.interval == wilson(320, 512)
    assert cell_of(LARGE, tmp_path, run, (0,), "full", 256, "strict").value == 0.7
    assert cell_of(LARGE, tmp_path, run, (0, 1), "full", 128, "published") is None


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"n": 256, "completion_length": 128, "exact": 0.5}', '{"n": 256, "completion_length": 256}',
        '{"n": 0, "completion_length": 256, "exact": 0.5}', '{"n": 256, "completion_length": 256, "exact": 1.5}',
        '{"n": 256, "completion_length": 256, "exact": NaN}', '{"n": true, "completion_length": 256, "exact": 0.5}',
    ],
)  # fmt: skip
def test_a_result_that_is_no_result_is_no_cell(content, tmp_path):
    run = LARGE.run("llada_8b-dmpo-countdown")
    evaluation(tmp_path, f"{run.name}-0", 256)
    (tmp_path / "eval" / f"{run.name}-0-full-256.json").write_text(content)
    assert cell_of(LARGE, tmp_path, run, (0,), "full", 256, "strict") is None


@pytest.fixture(scope="module")
def nothing_run(tmp_path_factory):
    """The folder where nothing was run, and the lines of its CSV."""
    folder = tmp_path_factory.mktemp("nothing")
    return folder, large(folder)


@pytest.fixture(scope="module")
def two_run(tmp_path_factory):
    """The folder where two evaluations were run, and the lines of its CSV."""
    folder = tmp_path_factory.mktemp("two")
    evaluation(folder, "llada_8b-dmpo-countdown-0", 256, published={"accuracy": 0.8125}, exact=0.75)
    evaluation(folder, "llada_8b-base-gsm8k-0", 512, "half", n=1319, published={"accuracy": 0.78}, exact=0.77)
    return folder, large(folder)


def test_nothing_run_gives_published_numbers_and_empty_cells(nothing_run):
    folder, lines = nothing_run
    ours = [line for line in lines if line["who"] == "ours"]
    assert len(ours) == 2 * 3 * sum(len(run.protocols) for run in LARGE.runs)
    assert not any(line[key] for line in ours for key in ("percent", "low", "high", "n", "seeds", "source"))
    text = (folder / "tables.md").read_text()
    row = next(line for line in text.splitlines() if "published: DMPO (DMPO, Table 1)" in line)
    assert [cell.strip() for cell in row.split("|")[4:-1]] == (
        ["74.83", "82.41", "85.22", "30", "38.2", "42.8", "67.19", "80.86", "82.81", "32.76", "63.8", "56.67"]
    )  # fmt: skip
    mine = [line for line in text.splitlines() if "| ours: " in line]
    assert mine and all(set(line.split("|", 4)[4]) <= set(" |") for line in mine)
    assert "No evaluation has been run yet." in text


def test_ours_stand_beside_the_published_numbers_cell_by_cell(two_run):
    folder, lines = two_run
    (cell,) = (
        line for line in lines
        if line["percent"] and line["who"] == "ours" and line["method"] == "dmpo" and line["grading"] == "published"
    )  # fmt: skip
    low, high = wilson(208, 256)
    assert (cell["percent"], cell["low"], cell["high"]) == ("81.25", f"{100 * low:.2f}", f"{100 * high:.2f}")
    assert (cell["n"], cell["seeds"], cell["protocol"]) == ("256", "0", "steps = length")
    assert (cell["settings"], cell["source"]) == (
        "configs/llada_8b/dmpo_countdown.toml", "llada_8b-dmpo-countdown-0-full-256.json"
    )  # fmt: skip
    text = (folder / "tables.md").read_text()
    shown = f"81.2 [{100 * low:.1f}, {100 * high:.1f}]"

    def line_of(start, words):
        (found,) = (
            line for line in text.splitlines() if line.startswith(f"| LLaDA-8B-Instruct | {start}") and words in line
        )
        return found

    wide = line_of("dmpo | ours:", shown)
    assert [cell.strip() for cell in wide.split("|")[4:-1]].count("") == 11
    beside = line_of("dmpo | Countdown | 256 |", shown)
    assert "| 80.86; 67.19 | DMPO: DMPO, Table 1 (arXiv 2510.08233v3) [greedy, blocks of 32" in beside
    assert "DMPO-SFT, after SFT: DMPO, Table 1" in beside
    base = line_of("base | GSM8K | 512 |", "published | 78.0")
    assert "steps = length / 2" in base and "78.2" in base and "quoted by EGSPO" in base


def test_the_page_holds_the_tables_notes_and_claims_and_asks_for_nothing(two_run):
    folder, _ = two_run
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert "81.2 [" in page.words and "80.86" in page.words and "Command: none" in page.words
    assert "Uniform random digits get 25.2 %" in page.words and "wrong task" in page.words
    sources = [value for key, value in page.attributes if key in ("src", "href")]
    assert all(value.startswith("data:") for value in sources) and not re.search(r"url\(|@import", text)
    assert (folder / "comparison.png").read_bytes()[:8] == PNG


def test_every_published_number_is_in_the_csv_with_its_source(nothing_run):
    folder, lines = nothing_run
    lines = [line for line in lines if line["who"] == "published"]
    assert len(lines) == sum(len(row.values) for table in PUBLISHED.tables for row in table.rows)
    assert all(line["source"] and "arXiv" in line["source"] for line in lines)
    text = (folder / "tables.md").read_text()
    for words in ("EGSPO-SA", "SDAR-4B + TOPD", "mean pass@K over K = 1 to 32", "Claims as they are quoted"):
        assert words in text
