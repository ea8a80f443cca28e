"""Answers on file graded by the published and the strict rules, and why these differ."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dmpo_jax.errors import UserError
from dmpo_jax.evaluation import verdicts
from dmpo_jax.evaluation.generations import MAX_CHARACTERS, read_generations
from dmpo_jax.evaluation.intervals import wilson
from dmpo_jax.evaluation.reasons import NO_TRUTH, OTHER, REASONS
from dmpo_jax.evaluation.regrade import regrade
from dmpo_jax.evaluation.verdicts import answer_key, judge, solved, with_end
from dmpo_jax.tasks import TaskConfig, countdown, get_task, gsm8k, math, sudoku
from dmpo_jax.tasks.sudoku_grids import completions, grids

SHARED = Path(__file__).resolve().parents[2] / "shared"
END = "<|eot_id|><|endoftext|>"
PUZZLE, SOLUTION = "1030300200430001", "1234341221434321"  # nine blanks, one solution
TWO = "0034340000434300"  # eight blanks, several solutions


def tag(answer):
    return f"<answer>{answer}</answer>"


def box(answer):
    return f"\\boxed{{{answer}}}"


def other_solution():
    """Another grid that keeps the clues of TWO, and how many of its blanks are as in SOLUTION."""
    fits = completions(np.array([[int(digit) for digit in TWO]]))[0]
    found = min({"".join(map(str, grid)) for grid in grids()[fits].tolist()} - {SOLUTION})
    return found, sum(one == two and given == "0" for one, two, given in zip(found, SOLUTION, TWO, strict=True))


ELEVEN = {"numbers": [5, 6], "target": 11}
COUNTDOWN = [
    # text, truth, published, strict, reason
    (tag(box("5+6")) + END, ELEVEN, 1, 1, ""),
    (tag("6-5") + END, ELEVEN, 0, 0, ""),
    (tag("6-5") + END + box("5+6"), ELEVEN, 1, 0, "text after the end token"),
    (box("5+6") + END, ELEVEN, 1, 0, "no answer tag"),
    ("<answer>" + box("5+6") + END, ELEVEN, 1, 0, "answer tag not closed"),
    (tag(box("5+6") + " " * 300), ELEVEN, 1, 0, "answer too long"),
    (tag("5+6") + tag("6-5") + r"\boxed{", ELEVEN, 1, 0, "first of several answers"),
    (box("5+6") + tag("6-5"), ELEVEN, 1, 0, "box outside the answer"),
    (tag("5+6") + box("6-5"), ELEVEN, 0, 1, "box outside the answer"),
    (tag("5+6") + box(""), ELEVEN, 0, 1, "box outside the answer"),
    ("as 5+6 = 11 holds " + tag("6-5"), ELEVEN, 1, 0, "equation in the working"),
    (tag("5+6"), ELEVEN, 0, 1, "answer without a box"),
    (box(tag("5+6")), ELEVEN, 0, 1, "box outside the answer"),
    ("as 6-5 = 1 " + tag("5+6"), ELEVEN, 0, 1, "answer without a box"),
    (tag("it is " + box("5+6")), ELEVEN, 1, 0, "text round the expression"),
    (tag(box("it is 5+6 = 11")), ELEVEN, 1, 0, "text round the expression"),
    (tag(box("5+6 = 12")), ELEVEN, 1, 0, "after the equals sign"),
    (tag(box(r"5 \times 6 = 31")), {"numbers": [5, 6], "target": 30}, 1, 0, "after the equals sign"),
    (tag(box("5-6=-1")), {"numbers": [5, 6], "target": -1}, 0, 1, "after the equals sign"),
    (tag(box("2**5")), {"numbers": [2, 5], "target": 32}, 1, 0, "operator"),
    (tag(box("9//4")), {"numbers": [9, 4], "target": 2}, 1, 0, "operator"),
    (tag(box("2.5*4")), {"numbers": [2, 5, 4], "target": 10}, 1, 0, "decimal number"),
    (tag(box("--5+6")), ELEVEN, 1, 0, "sign"),
    (tag(box("1/999999")), {"numbers": [1, 999999], "target": 0}, 1, 0, "rounding"),
    (tag(box("05+6")), ELEVEN, 0, 1, "leading zero"),
    (tag(box("5\n+6")), ELEVEN, 0, 1, "line break"),
    (tag(box("5×6")), {"numbers": [5, 6], "target": 30}, 0, 1, "notation"),
]

GSM8K = [
    (tag(box("37")) + END, "37", 1, 1, ""),
    ("it is 37", "37", 0, 0, ""),
    (tag("36") + END + box("37"), "37", 1, 0, "text after the end token"),
    (tag("37" + " " * 300), "37", 1, 0, "answer too long"),
    (tag("37") + tag("36"), "37", 1, 0, "first of several answers"),
    (tag("36") + tag("37"), "37", 0, 1, "first of several answers"),
    (box("37") + tag("36"), "37", 1, 0, "box outside the answer"),
    (box("36") + tag(box("37")), "37", 0, 1, "box outside the answer"),
    (box("37") + box("36"), "37", 1, 0, "first of several boxes"),
    (tag(box("36") + box("37")), "37", 0, 1, "first of several boxes"),
    (r"\boxed{37\text{ eggs} in all", "37", 1, 0, "box not closed"),
    (box(r"\text{x} = 37"), "37", 0, 1, "braces in the box"),
    ("\\boxed{37\n}", "37", 0, 1, "line break in the box"),
    ("#### 37", "37", 0, 1, "answer after ####"),
    (tag(box("") + "37"), "37", 1, 0, "empty box"),
    (tag(box("1,234")) + END, "1,234", 0, 1, "thousands separator"),
    (tag(box(r"12\,345")), "12345", 0, 1, "thousands separator"),
    (tag(r"\$1,234"), "1234", 0, 1, "thousands separator"),
    (box("2/3"), "2", 1, 0, "fraction"),
    (box(r"\frac{2}{3}"), "2", 1, 0, "fraction"),
    (box("37 or 38"), "37", 1, 0, "several numbers"),
    (box("30 + 7 = 37"), "37", 0, 1, "several numbers"),
    (box("- 5"), "-5", 0, 1, "sign"),
    (tag(r"\foo 37"), "37", 1, 0, "form of the number"),
]

OTHER_GRID, AS_STORED = other_solution()
ONE = {"puzzle": PUZZLE, "solution": SOLUTION}
SUDOKU = [
    (tag(SOLUTION) + END, ONE, 9, 9, ""),
    (tag("12"), ONE, 1, 1, ""),
    (tag("") + END + SOLUTION, ONE, 9, 0, "text after the end token"),
    (SOLUTION, ONE, 9, 0, "no answer tag"),
    ("<answer>" + SOLUTION + END, ONE, 9, 0, "answer tag not closed"),
    (tag(SOLUTION + " " * 300), ONE, 9, 0, "answer too long"),
    (tag(SOLUTION) + tag("11"), ONE, 9, 0, "first of several answers"),
    (tag(f"no ```{SOLUTION}```"), ONE, 9, 0, "fenced block"),
    (tag("") + SOLUTION, ONE, 9, 0, "text after the answer"),
    (tag(",".join(SOLUTION)), ONE, 1, 9, "separators"),
    (tag(box(SOLUTION)), ONE, 3, 9, "wrapper"),
    (tag("1234x41221434321"), ONE, 9, 0, "other characters"),
    (tag(SOLUTION + "99"), ONE, 9, 0, "more than 16 digits"),
    (tag("2" + SOLUTION[1:]), ONE, 9, 0, "given clues overwritten"),
    (tag(OTHER_GRID), {"puzzle": TWO, "solution": SOLUTION}, AS_STORED, 8, "several solutions"),
]
MATH = [
    (tag(box("4")) + END, "4", 1, 1, ""),
    ("it is 4", "4", 0, 0, ""),
    (tag(box("5")) + END + box("4"), "4", 1, 0, "text after the end token"),
    (tag(box("4" + r"\!" * 200)), "4", 1, 0, "answer too long"),
    (r"\boxed{" + tag("4") + tag("5"), "4", 1, 0, "first of several answers"),
    ("4", "4", 1, 0, "no answer tag"),
    (tag("4") + " as 2+2 = " + box("5"), "4", 0, 1, "box outside the answer"),
    (tag(r"\boxed{4"), "4", 0, 1, "box not closed"),
    (tag(box("0.25")), r"\frac{1}{4}", 0, 1, "written otherwise"),
    (tag(box("4\\text{ or } 5")), "4", 1, 0, "cut to the same text"),
]
CASES = {"countdown": COUNTDOWN, "gsm8k": GSM8K, "math": MATH, "sudoku": SUDOKU}
TASKS = {"countdown": countdown, "gsm8k": gsm8k, "math": math, "sudoku": sudoku}


@pytest.mark.parametrize("task", CASES)
def test_verdicts_and_reasons(task):
    for text, truth, published, strict, reason in CASES[task]:
        features = TASKS[task].features(truth)
        found = judge(task, text, features)
        assert (found.published.right, found.strict.right, found.reason) == (published, strict, reason), (text, found)
        assert verdicts.TASKS[task].published(text, features)[0] == published
    reached = {reason for *_, reason in CASES[task] if reason}
    assert reached == set(REASONS[task]) - {OTHER, NO_TRUTH}


def test_other_tasks_have_no_published_verdict():
    assert "own" not in verdicts.TASKS
    with pytest.raises(
        UserError, match=r'task\.name = "own": answers of countdown, gsm8k, math, sudoku can be graded anew'
    ):
        judge("own", "x", {})


def test_small_helpers():
    assert with_end("x", True) == "x<|eot_id|>"
    assert with_end("x", False) == "x"
    assert solved({"reward": 0.5, "exact": 1.0})
    assert not solved({"reward": 1.0, "correct": 0.0})
    assert solved({"reward": 1.0})
    same = {answer_key("gsm8k", text) for text in (tag("37"), box("37.0"), tag(box(r"\$ 37")))}
    assert len(same) == 1
    assert answer_key("gsm8k", "none") == answer_key("countdown", "5+6") == ""
    assert answer_key("countdown", tag(" 5 + 6")) == "5+6"
    assert answer_key("sudoku", tag("1,2 3\n4")) == "1234"
    assert answer_key("math", tag(box("x + 1"))) == "x+1"


# ---- files


def d1_truth(task, truth):
    if task == "countdown":
        return [truth["numbers"], truth["target"]]
    if task == "math":
        return truth
    return truth["solution"] if task == "sudoku" else float(truth.replace(",", ""))


def d1_question(task, truth):
    if task == "countdown":
        return f"Numbers: {truth['numbers']}\nTarget: {truth['target']}"
    return f"Solve the following Sudoku puzzle: {truth['puzzle']}\n" if task == "sudoku" else f"Is it {truth}?"


def d1_file(path, task, cases, **settings):
    rows = [
        {"question": d1_question(task, truth), "generations": text, "ground_truth": d1_truth(task, truth)}
        for text, truth, *_ in cases
    ]
    path.write_text(json.dumps({"generations": rows, "metrics": {"wall_time": 1.5}, "model_path": "x", **settings}))
    return str(path)


@pytest.fixture
def config(tmp_path):
    def write(task, extra=""):
        path = tmp_path / f"{task}.toml"
        path.write_text(f'[task]\nname = "{task}"\n{extra}\n[model]\npretrained = "no/such-model"\n')
        return path

    return write


@pytest.mark.parametrize("task", CASES)
def test_files_of_the_d1_family(tmp_path, config, task):
    cases = CASES[task]
    files = [
        d1_file(tmp_path / "0.json", task, cases[:5], gen_length=64, diffusion_steps=32),
        d1_file(tmp_path / "1.json", task, cases[5:], gen_length=64, diffusion_steps=64, block_length=32),
    ]
    out = tmp_path / "out" / "found.json"
    result = regrade(config(task), [], files, out)
    assert json.loads(out.read_text()) == result
    lines = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    count, units = len(cases), {"sudoku": 9 * len(cases) - 1}.get(task, len(cases))
    published, strict = (sum(case[i] for case in cases) for i in (2, 3))
    assert (result["task"], result["n"], result["gen_length"]) == (task, count, 64)
    assert "diffusion_steps" not in result
    assert (result["published"]["correct"], result["published"]["of"]) == (published, units)
    assert (result["strict"]["correct"], result["strict"]["of"]) == (strict, units)
    assert result["published"]["accuracy"] == published / units
    assert result["published"]["accuracy_ci95"] == list(wilson(published / units * count, count))
    solves = sum(case[3] == (1 if task != "sudoku" else 8 + (case[1] is ONE)) for case in cases)
    assert (result["exact"], result["exact_ci95"]) == (solves / count, list(wilson(solves, count)))
    assert result["differences"] == sum(bool(case[4]) for case in cases) == sum(result["reasons"].values())
    for number, (line, case) in enumerate(zip(lines, cases, strict=True)):
        assert (line["completion"], line["published"], line["strict"], line.get("reason", "")) == (case[0], *case[2:])
        assert (line["file"], line["item"]) == (files[number > 4], number + 1 if number < 5 else number - 4)
        assert len(line["published_read"]) <= 203


def own_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


@pytest.mark.parametrize(
    ("task", "prompt", "published", "reason"),
    [
        ("countdown", "compact", 0, "answer without a box"),
        ("countdown", "instruct", 0, "answer without a box"),
        ("sudoku", "compact", 1, "answer tag not closed"),
        ("sudoku", "rows", 1, "answer tag not closed"),
        ("sudoku", "instruct", 1, "answer tag not closed"),
    ],
)
def test_files_of_our_own_evaluation(tmp_path, config, task, prompt, published, reason):
    examples = get_task(task).examples(TaskConfig(name=task, prompt=prompt, test_size=3), "test")
    rows = [{"prompt": e.prompt, "completion": e.demonstration, "truth": e.truth} for e in examples]
    # What is not closed ends with the end token, which decoding took off.
    rows += [row | {"completion": row["completion"].removesuffix("</answer>"), "ended": True} for row in rows]
    result = regrade(config(task), [], own_file(tmp_path / "items.jsonl", rows), tmp_path / "found.json")
    assert (result["n"], result["exact"], result["published"]["accuracy"]) == (6, 0.5, published)
    assert result["reasons"] == {reason: 3}


def test_one_line_of_our_own_evaluation(tmp_path, config):
    row = {"prompt": "Is it so?", "completion": tag("1,234"), "truth": "1,234", "nfe": 3}
    result = regrade(config("gsm8k"), [], own_file(tmp_path / "items.jsonl", [row]), tmp_path / "found.json")
    assert (result["published"]["correct"], result["exact"]) == (0, 1.0)
    assert result["reasons"] == {"thousands separator": 1}


def test_truths_that_a_file_lacks(tmp_path, config):
    rows = [
        {"question": "How cold?", "generations": box("-10"), "ground_truth": None},
        {"question": "How far?", "generations": box("7"), "ground_truth": 7},
        {"question": "How long?", "generations": "hm", "ground_truth": None},
    ]
    path, known = tmp_path / "g.json", tmp_path / "test.jsonl"
    path.write_text(json.dumps({"generations": rows}))
    known.write_text(
        "".join(
            json.dumps({"question": question, "answer": f"so\n#### {answer}"}) + "\n"
            for question, answer in (("How cold?", -10), ("How far?", 8))
        )
    )
    result = regrade(config("gsm8k"), [], [str(path)], tmp_path / "a.json")
    assert (result["published"]["correct"], result["strict"]["correct"], result["without_truth"]) == (1, 1, 2)
    assert result["differences"] == 0
    for name, extra, data in (("b", "", str(known)), ("c", f'test_file = "{known}"', "")):
        result = regrade(config("gsm8k", extra), [], [str(path)], tmp_path / f"{name}.json", data)
        # The published evaluation compares with what the file holds: nothing.
        assert (result["published"]["correct"], result["strict"]["correct"], result["without_truth"]) == (1, 2, 1)
        assert result["reasons"] == {NO_TRUTH: 1}
        assert result["truths_looked_up"] == 1
    with pytest.raises(UserError, match=r"--data .*: files of countdown answers hold their truths; leave it out"):
        regrade(config("countdown"), [], [str(path)], tmp_path / "d.json", str(known))


def test_truth_of_the_question(tmp_path):
    path = tmp_path / "g.json"
    row = {"question": "numbers: [5, 6]\nTarget: 11", "generations": "", "ground_truth": "?"}
    path.write_text(json.dumps({"generations": [row | {"ground_truth": None}]}))
    (item,) = read_generations(str(path), "countdown").items
    assert (item.features["numbers"].tolist(), int(item.features["target"])) == ([5, 6, 0, 0, 0, 0], 11)
    path.write_text(
        json.dumps({"generations": [{"question": f"{PUZZLE}", "generations": "", "ground_truth": SOLUTION}]})
    )
    (item,) = read_generations(str(path), "sudoku").items
    assert item.features["puzzle"].tolist() == [int(digit) for digit in PUZZLE]


ROW = {"question": "Numbers: [5, 6]\nTarget: 11", "generations": "x", "ground_truth": [[5, 6], 11]}


def wrapped(*rows):
    return json.dumps({"generations": list(rows)})


BAD = [
    # task, content, message
    ("countdown", "", "holds 0 answers, expected 1 to 100000"),
    ("countdown", "{", "line 1: not a JSON object; give"),
    ("countdown", '{"a": 1}\n[]\n', "line 2: not a JSON object"),
    ("countdown", "[" * 100_000, "line 1: not a JSON object"),
    ("countdown", '{"x": ' + "9" * 5000 + "}", "line 1: not a JSON object"),
    ("countdown", '{"generations": 3}', "generations = 3: expected a list"),
    ("countdown", '{"generations": []}', "holds 0 answers"),
    ("countdown", wrapped(ROW, 3), "item 2: the item = 3: expected an object with question, generations, ground_truth"),
    ("countdown", wrapped({"question": "x"}), "item 1: generations = None: expected a text"),
    ("countdown", wrapped(ROW | {"generations": ["x"]}), "item 1: generations = .*expected a text"),
    ("countdown", wrapped(ROW | {"generations": "x" * (MAX_CHARACTERS + 1)}), "a text of at most 131072 characters"),
    (
        "countdown",
        wrapped(ROW | {"ground_truth": [[5, "6"], 11]}),
        "item 1: ground_truth = .*expected .*49, 55, 53.*at most 6 numbers",
    ),
    ("countdown", wrapped(ROW | {"ground_truth": [[5, True], 11]}), "item 1: ground_truth"),
    ("countdown", wrapped(ROW | {"ground_truth": [[1] * 7, 11]}), "item 1: ground_truth"),
    ("countdown", wrapped(ROW | {"ground_truth": [[5, 2**40], 11]}), "item 1: ground_truth"),
    ("countdown", wrapped(ROW | {"ground_truth": [[99999, 99999], 11]}), r"item 1: numbers \[99999, 99999\]"),
    ("countdown", wrapped(ROW | {"ground_truth": [[], 11]}), r"item 1: numbers \[\]"),
    ("countdown", wrapped(ROW | {"ground_truth": "1/0"}), "item 1: ground_truth"),
    (
        "countdown",
        wrapped(ROW | {"ground_truth": None, "question": "Numbers: [5,]\nTarget: 11"}),
        "item 1: ground_truth",
    ),
    ("countdown", '{"prompt": "", "completion": "", "truth": "1/2"}', "item 1: truth = '1/2'"),
    (
        "countdown",
        '{"prompt": "", "completion": "", "truth": "1+1", "ended": 1}',
        "item 1: ended = 1: expected true or false",
    ),
    ("gsm8k", wrapped(ROW), "item 1: ground_truth = .*: expected a number, its text, or null"),
    ("gsm8k", wrapped(ROW | {"ground_truth": True}), "item 1: ground_truth = True"),
    (
        "gsm8k",
        '{"generations": [{"question": "", "generations": "", "ground_truth": NaN}]}',
        "item 1: ground_truth = nan",
    ),
    ("gsm8k", wrapped(ROW | {"ground_truth": 1e300}), "item 1: ground_truth = 1e"),
    ("gsm8k", wrapped(ROW | {"ground_truth": "many"}), "item 1: true answer 'many'"),
    ("sudoku", wrapped(ROW | {"ground_truth": SOLUTION}), "item 1: question 'Numbers.*expected a puzzle of 16 digits"),
    ("sudoku", wrapped(ROW | {"question": SOLUTION, "ground_truth": SOLUTION}), "expected a puzzle of 16 digits"),
    (
        "sudoku",
        wrapped(ROW | {"question": PUZZLE, "ground_truth": int(SOLUTION)}),
        "item 1: ground_truth = 1234341221434321",
    ),
    ("sudoku", wrapped(ROW | {"question": PUZZLE, "ground_truth": SOLUTION[:-1]}), "expected the 16 digits of a grid"),
    ("sudoku", wrapped(ROW | {"question": PUZZLE, "ground_truth": "1" * 16}), "expected the 16 digits of a grid"),
    ("sudoku", wrapped(ROW | {"question": "2" + PUZZLE[1:], "ground_truth": SOLUTION}), "keeps the puzzle's clues"),
]


@pytest.mark.parametrize(("task", "content", "message"), BAD)
def test_bad_files(tmp_path, config, task, content, message):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(UserError, match=f"bad.json.*{message}") as caught:
        regrade(config(task), [], [str(path)], tmp_path / "out.json")
    assert len(str(caught.value)) < 600
    assert not (tmp_path / "out.json").exists()


def test_paths_and_settings(tmp_path, config):
    good = d1_file(tmp_path / "good.json", "gsm8k", GSM8K)
    out = tmp_path / "out.json"
    for file, message in ((str(tmp_path / "no.json"), "No such file"), (str(tmp_path), "is a directory")):
        with pytest.raises(UserError, match=message):
            regrade(config("gsm8k"), [], [file], out)
    (tmp_path / "raw.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8 text"):
        regrade(config("gsm8k"), [], [str(tmp_path / "raw.json")], out)
    with pytest.raises(UserError, match=r"--set sampler\.steps: dmpo eval --generations does not use it"):
        regrade(config("gsm8k"), ["sampler.steps=4"], [good], out)
    with pytest.raises(UserError, match=r"expected a file name that ends in \.json"):
        regrade(config("gsm8k"), [], [good], tmp_path / "out.txt")
    plain = tmp_path / "plain.toml"
    plain.write_text("")
    unread = ["task.name=gsm8k", "task.test_file=no-such-file.jsonl"]  # no truth is missing
    assert regrade(plain, unread, [good], out)["task"] == "gsm8k"
    plain.write_text("task = 3")
    with pytest.raises(UserError, match=r"expected a section \[task\]"):
        regrade(plain, [], [good], out)


def test_lone_surrogates_are_written_out(tmp_path, config):
    path = tmp_path / "g.json"
    path.write_text(wrapped({"question": "q", "generations": "\ud800 " + box("7"), "ground_truth": 7}))
    result = regrade(config("gsm8k"), [], [str(path)], tmp_path / "out.json")
    assert result["published"]["correct"] == 1
    assert "?" in json.loads((tmp_path / "out.jsonl").read_text())["completion"]


def test_no_device_is_needed(tmp_path, config):
    files = [d1_file(tmp_path / "g.json", "sudoku", SUDOKU)]
    script = (
        "import sys; from pathlib import Path; from dmpo_jax.evaluation.regrade import regrade\n"
        "regrade(Path(sys.argv[1]), [], sys.argv[2:3], Path(sys.argv[3]))"
    )
    arguments = [str(config("sudoku")), *files, str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "none_at_all"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "out.json").read_text())["n"] == len(SUDOKU)


@pytest.mark.parametrize("task", CASES)
def test_hostile_completions_are_judged_quickly(task):
    features = TASKS[task].features(CASES[task][0][1])
    for text in ("<answer>" * 16_000, r"\boxed{" * 18_000, "1=" * 60_000, "<answer>" + " \n" * 60_000, "`" * 120_000,
                 tag("(" * 60_000), "1" * 130_000, "<|eot_id|>" * 13_000, box("{" * 60_000), "}{" * 60_000,
                 tag("1,234" * 24_000), box("1" * 120_000), "\n" * 130_000):  # fmt: skip
        start = time.monotonic()
        judge(task, text, features)
        assert time.monotonic() - start < 3, text[:20]


@pytest.mark.parametrize(
    ("task", "published", "of", "strict"),
    [("countdown", 50, 256, 40), ("gsm8k", 863, 1130, 867), ("sudoku", 137, 2048, 17)],
)
def test_published_generations(tmp_path, config, task, published, of, strict):
    """d1's own parser finds the same; every difference has a reason."""
    files = sorted(map(str, (SHARED / "data" / "generations").glob(f"{task}_*_256_128_*.json")))
    if not files:
        pytest.skip("../shared/data/generations is absent")
    result = regrade(config(task), [], files, tmp_path / "out.json")
    assert (result["published"]["correct"], result["published"]["of"], result["strict"]["correct"]) == (
        published,
        of,
        strict,
    )
    assert result["differences"] > 0
    assert OTHER not in result["reasons"]
