import json
import re
from html.parser import HTMLParser

import pytest

from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.charts import MAX_POINTS, Panel, draw, panels
from dmpo_jax.evaluation.gallery import answer_cells, puzzle_cells, sudoku_grid, visible
from dmpo_jax.evaluation.report import write_report
from dmpo_jax.evaluation.run_folder import read_runs

PUZZLE, SOLUTION = "1030300200430001=", "1234341221434321"
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that tags balance; collects tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def metrics(cycles=6):
    return [
        {
            "cycle": c,
            "updates": 4 * c,
            "reward/mean": 0.4 + 0.05 * c,
            "reward/std": 0.2,
            "reward/cells": 0.5,
            "reward/zero_std_groups": 0.1,
            "ess/mean": 5.0,
            "ess/min": 2.0,
            "log_ratio/mean": 0.0,
            "log_ratio/std": 0.3,
            "loss": 1.0 - 0.1 * c,
            "grad_norm": 1.0,
            "completion_length": 33.0,
            "nfe/mean": 12.0,
            "time/cycle_s": 0.9,
            "time/compile_s": 0.0,
            "tokens_per_second": 14000.0,
            **({"eval/accuracy": 0.7, "eval/exact": 0.4} if c % 3 == 0 else {}),
        }
        for c in range(cycles)
    ]


def result(exact, n=256, **changes):
    values = {
        "task": "sudoku",
        "n": n,
        "accuracy": 0.9,
        "accuracy_ci95": [0.88, 0.92],
        "exact": exact,
        "exact_ci95": [0, 1],
        "mean_nfe": 12.0,
        "tokens_per_second": 15000.0,
        "baselines": {"random digits": 0.25, "elimination": {"accuracy": 0.71, "exact": 0.31}},
        "temperature": 0.0,
    }
    return values | changes


def item(completion=f"<answer>{SOLUTION}</answer>", exact=True, **changes):
    values = {"prompt": PUZZLE, "completion": completion, "truth": SOLUTION, "score": 1.0, "exact": exact}
    return values | changes


def write_lines(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def make_run(folder, before=105 / 256, after=223 / 256, items=(), **summary):
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("[run]\nseed = 3\n")
    write_lines(folder / "metrics.jsonl", metrics())
    sample = {
        "prompt": PUZZLE,
        "completion": f"<answer>{SOLUTION}</answer>",
        "truth": SOLUTION,
        "reward": 1.0,
    }
    write_lines(folder / "samples.jsonl", [{"cycle": c} | sample for c in range(6)])
    write_lines(folder / "eval" / "before.jsonl", items or [item()])
    write_lines(folder / "eval" / "after.jsonl", items or [item()])
    values = {"status": "done", "cycles": 6, "seconds": 95.4, "versions": {"jax": "0.10.2"}}
    values |= {"test_before": result(before), "test_after": result(after)} | summary
    (folder / "summary.json").write_text(json.dumps(values))
    return folder


def report(tmp_path, *runs):
    write_report(list(runs), tmp_path / "out" / "report.html")
    return (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def spaced(page):
    return re.sub(r"\s+", " ", page.text)


def test_verdict_and_table_hold_the_right_numbers(tmp_path):
    page = Page(report(tmp_path, make_run(tmp_path / "run")))
    # 105 and 223 of 256. np.roots of Wilson's quadratic gives 0.35166, 0.47130 and 0.82450, 0.90672; with
    # them Newcombe's formula gives 0.38406, 0.52942.
    assert (
        "run: on 256 sudoku test items, exact solves went from 41.0 % (95 % interval 35.2 to 47.1 %) "
        "to 87.1 % (82.4 to 90.7 %): +46.1 points (95 % interval +38.4 to +52.9). 6 cycles on "
        "file; the run took 95 s."
    ) in spaced(page)
    assert "What is missing" not in page.text
    for text in ("88.0 to 92.0 %", "trivial: random digits", "25.0 %", "31.0 %", "15,000", "jax 0.10.2"):
        assert text in spaced(page)
    assert "seed = 3" in page.text and '"temperature": 0.0' in page.text


def test_a_drop_and_no_difference_are_said(tmp_path):
    worse = make_run(tmp_path / "worse", before=0.5, after=0.25)
    same = make_run(tmp_path / "same", before=0.5, after=0.5)
    text = spaced(Page(report(tmp_path, worse, same)))
    assert "−25.0 points (95 % interval −32.8 to −16.7). The policy got worse." in text
    assert "+0.0 points (95 % interval −8.6 to +8.6). The interval includes 0" in text


def test_flips_are_counted_only_on_complete_files(tmp_path):
    run = make_run(tmp_path / "run", test_before=result(0.5, n=4), test_after=result(0.5, n=4))
    write_lines(run / "eval" / "before.jsonl", [item(exact=e) for e in (True, True, False, False)])
    write_lines(run / "eval" / "after.jsonl", [item(exact=e) for e in (True, False, True, False)])
    assert "Item by item, 1 became exact and 1 ceased to be." in Page(report(tmp_path, run)).text
    write_lines(run / "eval" / "after.jsonl", [item(exact=True)])
    assert "Item by item" not in Page(report(tmp_path, run)).text


def test_several_seeds_share_charts_and_pretraining_stands_apart(tmp_path):
    runs = [make_run(tmp_path / f"seed-{i}", after=a) for i, a in enumerate((0.8, 0.85, 0.9))]
    pretrain = tmp_path / "pretrain"
    write_lines(pretrain / "metrics.jsonl", [{"cycle": c, "updates": c, "loss": 2 - c / 10} for c in range(5)])
    html = report(tmp_path, *runs, pretrain)
    page = Page(html)
    text = spaced(page)
    assert (
        "Mean of 3 runs: exact solves 41.0 % before, 85.0 % after, +44.0 points (lowest run +39.0, highest +49.0)."
    ) in text
    assert "pretrain (pretraining): no test results. Loss: 2.000 first, 1.600 last. 5 cycles on file" in text
    training, rest = html.split("<h2>Pretraining curves (denoising loss)</h2>")
    reward = training.split("<figcaption>Reward<")[1].split("</figure>")[0]
    assert all(f"stroke: var(--series-{i})" in reward for i in range(3)) and "series-3" not in reward
    pretraining = rest.split("</section>")[0]
    assert pretraining.count("<figure>") == 1 and "Loss" in pretraining and "pretrain" in pretraining
    assert len(set(re.findall(r' id="([^"]*)"', html))) == len(re.findall(r' id="', html))


def test_page_asks_for_nothing_outside_itself(tmp_path):
    html = report(tmp_path, make_run(tmp_path / "run"))
    page = Page(html)
    assert not re.search(r"https?:|@import|url\((?!#)", html)
    assert not {"script", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href"):
            assert value.startswith("#") or value == "data:,"
    assert "default-src 'none'" in html and "prefers-color-scheme: dark" in html
    assert "currentColor" in html and "#0102" not in html and "#0103" not in html
    assert page.tags.count("svg") > 10


def test_hostile_text_is_escaped_everywhere(tmp_path):
    evil = "</svg></style><script>alert(1)</script>\x00\u202e\ud800$x^{$\"'"
    run = tmp_path / "<script>x<" / "a$b<i>"
    bad_item = item(completion=f"<answer>{evil}</answer>", prompt=evil, truth=evil, score=evil)
    bad_cells = item(completion="<answer><i>3434122143434</answer>", exact=False)
    make_run(
        run,
        items=[bad_item, bad_cells],
        test_before=result(0.5, task=evil, baselines={evil: evil}, **{evil: evil}),
        test_after=result(0.6, task=evil, n=evil),
        versions={evil: evil},
        status=evil,
    )
    (run / "config.toml").write_text("</pre></details><script>")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"cycle": 7, "reward/mean": 0.1, f"reward/{evil}": 1.0}) + "\n")
    html = report(tmp_path, run)
    page = Page(html)
    assert "script" not in page.tags and "i" not in page.tags
    assert "&lt;<span" in html  # the cells of a grid are escaped one by one
    assert "<script" not in html and "</pre></details><script>" in page.text
    assert "\x00" not in html and "\u202e" not in html
    assert r"\x00" in page.text and r"\u202e" in page.text and r"\ud800" in page.text


def test_interrupted_run_is_reported_with_what_is_missing(tmp_path):
    run = tmp_path / "run"
    write_lines(run / "metrics.jsonl", metrics())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"cycle": 6, "reward/me')
    text = spaced(Page(report(tmp_path, run)))
    for note in (
        "metrics.jsonl: 1 line cut short or not JSON, skipped (line 7)",
        "no summary.json",
        "the run has not finished; its last recorded cycle is 5",
        "no samples.jsonl",
        "no config.toml",
        "run: no test results. Mean reward on training prompts: 0.400 first, 0.650 last.",
    ):
        assert note in text


def test_cut_and_strange_files_still_give_a_report(tmp_path):
    run = make_run(tmp_path / "run", test_before=result(float("nan")), test_after=result(1.5, n="many"))
    (run / "samples.jsonl").write_text('{"cycle": 0, "prompt": "q", "completion": 3}\n[1]\n{"cyc')
    (run / "eval" / "before.jsonl").write_bytes(b'\xff\xfe\n{"prompt": null}\n{"completion"')
    (run / "eval" / "after.jsonl").unlink()
    nested = "[" * 100_000
    (run / "metrics.jsonl").write_text(
        '{"cycle": 0, "loss": NaN, "reward/mean": null}\n'
        '{"cycle": 1, "loss": 1e999, "reward/mean": 0.5, "grad_norm": 1e300, "x": ' + "9" * 400 + "}\n"
        '{"cycle": 1, "loss": 0.25, "reward/mean": 0.75, "reward/std": true}\n' + nested + "\n\n7\n"
        '{"updates": 3}\n'
    )
    text = spaced(Page(report(tmp_path, run)))
    assert "metrics.jsonl: 2 lines cut short or not JSON, skipped (line 4, 6)" in text
    assert "samples.jsonl: 2 lines cut short" in text and "eval/before.jsonl: 2 lines cut short" in text
    assert "no eval/after.jsonl" in text
    assert "test_before.exact is nan, not a usable number" in text
    assert "test_after.n is 'many', not a usable number" in text
    assert "0.750 first, 0.750 last" in text
    (run / "summary.json").write_text('{"status": "do')
    assert "summary.json is cut short" in Page(report(tmp_path, run)).text
    (run / "metrics.jsonl").write_text("")
    assert "metrics.jsonl holds no finished cycle yet" in Page(report(tmp_path, run)).text


def test_bad_input_names_the_folder_and_the_remedy(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no metrics.jsonl; .*--run-dir"):
        write_report([tmp_path / "empty"], tmp_path / "x.html")
    with pytest.raises(UserError, match=r"absent is not a folder"):
        write_report([tmp_path / "absent"], tmp_path / "x.html")
    with pytest.raises(UserError, match="no run folder given"):
        write_report([], tmp_path / "x.html")
    with pytest.raises(UserError, match="cannot write the report to"):
        write_report([make_run(tmp_path / "run")], tmp_path / "empty")
    assert not (tmp_path / "x.html").exists()


def test_labels_are_distinct(tmp_path):
    a, b = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")
    assert [run.label for run in read_runs([a, b, b])] == ["a/run", "b/run", "b/run (2)"]


def test_report_is_deterministic_and_small(tmp_path):
    run = make_run(tmp_path / "run")
    write_lines(run / "metrics.jsonl", [m | {"loss": (7 * m["cycle"] % 11) / 3} for m in metrics(200)])
    first = report(tmp_path, run)
    assert report(tmp_path, run) == first
    assert len(first.encode()) < 400_000


def test_chart_tick_labels_are_the_axis_values():
    records = [{"cycle": c, "loss": 0.5 + 0.01 * c} for c in range(6)]
    svg = draw(Panel("Loss", "loss"), [records], "salt")
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert labels == ["0", "1", "2", "3", "4", "5", "cycle", "0.510", "0.525", "0.540"]


def test_chart_shades_and_bounds_long_runs():
    records = [{"cycle": c, "ess/mean": 5.0 + c % 2, "ess/min": 1.0} for c in range(10_000)]
    panel = next(p for p in panels([records]) if p.key == "ess/mean")
    svg = draw(panel, [records, []], "salt")
    assert "fill: var(--series-0)" in svg and "var(--series-1)" not in svg
    assert len(svg) < 60 * MAX_POINTS * 3
    assert panels([[]]) == []


def test_visible_text():
    assert visible("a<b>&\"'\n") == "a&lt;b&gt;&amp;&quot;&#x27;\n"
    assert visible("\té漢") == '<span class="odd">\\x09</span>é漢'
    assert visible("\u200b") == '<span class="odd">\\u200b</span>'
    assert visible("\U000e0001") == '<span class="odd">\\U000e0001</span>'
    assert visible("x" * 10, limit=4) == 'xxxx<span class="odd">[6 more characters]</span>'
    assert visible(None) == "None"


@pytest.mark.parametrize(
    ("completion", "cells"),
    [
        (f"<answer>{SOLUTION}</answer>", SOLUTION),
        ("<answer>1</answer> then <answer>\n1234 3412\n2143 4321 </answer><|eot|>", SOLUTION),
        (SOLUTION, SOLUTION),
        ("<answer>123</answer>", None),
        (f"<answer>{SOLUTION}", None),
        ("<answer>" * 50_000, None),
        (None, None),
        ("", None),
    ],
)
def test_answer_cells(completion, cells):
    assert answer_cells(completion) == cells


def test_puzzle_cells_takes_the_last_grid_of_the_prompt():
    assert puzzle_cells(f"Example 1234000000000000, now solve: {PUZZLE}") == "1030300200430001"
    assert puzzle_cells("12345678901234567890") is None
    assert puzzle_cells(12) is None


def test_sudoku_grid_marks_cells_without_relying_on_colour():
    # Cell 1 (blank, holds 2) is wrong; cell 0 (a clue) was overwritten; the other seven blanks are right.
    grid = sudoku_grid("1030300200430001", "4" + "3" + "34341221434321"[:13] + "1", SOLUTION)
    wrong = re.findall(r'<td class="wrong">(.)<span class="mark" role="img" aria-label="wrong">×</span>', grid)
    assert wrong == ["4", "3"]
    assert "<b>3</b>" in grid and grid.count('class="right"') == 8 and "8 of 9 blanks right" in grid
    solved = sudoku_grid("1030300200430001", "1" * 16, SOLUTION, solved=True)
    assert "wrong" not in solved


def test_puzzles_are_found_with_and_without_spaces():
    from dmpo_jax.evaluation.gallery import puzzle_cells

    assert puzzle_cells("1030300200430001=") == "1030300200430001"
    assert puzzle_cells("solve 1030 3002 0043 0001=") == "1030300200430001"
    assert puzzle_cells("10303002004300011") is None and puzzle_cells("1030 3002 0043=") is None
