"""The task math: files in the published forms, splits, prompts, demonstrations, features, figures, worker processes."""

import dataclasses
import json

import numpy as np
import pytest

from dmpo_jax.errors import UserError
from dmpo_jax.grading import math_published
from dmpo_jax.grading.pool import GraderPool
from dmpo_jax.tasks import math
from dmpo_jax.tasks.math_files import read_items
from dmpo_jax.tasks.task import TaskConfig

pytest.importorskip("math_verify", reason="the optional dependency of the task math")

CONFIG = TaskConfig(name="math", validation_size=1)
TASKS = {reward: math.configure(dataclasses.replace(CONFIG, reward=reward)) for reward in ("exact", "published")}
ROWS = [
    {"problem": "What is $3+4$?", "level": "Level 1", "type": "Algebra", "solution": "We have\n$3+4=\\boxed{7}$."},
    {"problem": 'Say "half",\nin short.', "solution": "First $\\boxed{1}$, no: $\\frac{\\boxed{\\frac{1}{2}}}{1}$."},
    {"problem": "What are {a, b}?", "solution": "See $\\boxed{1}$.", "answer": "1,\\!200", "subject": "Algebra"},
]
TRUTHS = ["7", r"\frac{1}{2}", r"1,\!200"]


def write(tmp_path, content, name="data"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv_text(rows, columns):
    quoted = [",".join('"' + row.get(column, "").replace('"', '""') + '"' for column in columns) for row in rows]
    return ",".join(columns) + "\r\n" + "".join(f"{line}\r\n" for line in quoted)


# ---- files


@pytest.mark.parametrize(
    "content",
    [
        jsonl(ROWS),
        "\ufeff" + jsonl(ROWS),
        csv_text(ROWS, ["problem", "solution", "answer", "level"]),
        csv_text(
            [{"Problem": row["problem"], "answer": truth} for row, truth in zip(ROWS, TRUTHS, strict=True)],
            ["Problem", "answer"],
        ),
    ],
)
def test_files_in_published_forms(tmp_path, content):
    examples = math.read(write(tmp_path, content), CONFIG)
    assert [example.truth for example in examples] == TRUTHS
    assert [example.prompt for example in examples] == [row["problem"] + "\n" for row in ROWS]
    for example in examples:
        for task in TASKS.values():
            assert task.grade_text(example.demonstration, example.features)["correct"] == 1


def test_answers_of_solutions(tmp_path):
    rows = [
        {"problem": "a", "solution": r"it is \fbox{3}"},
        {"problem": "b", "solution": r"it is $\boxed 4$ then"},
        {"problem": "c", "answer": 5},
        {"problem": "d", "solution": r"so $\boxed{\text{(A)}}$ and \boxed", "answer": ""},
    ]
    path = write(tmp_path, jsonl(rows))
    assert [item.truth for _, item in read_items(path)] == ["3", "4", "5", r"\text{(A)}"]


GOOD = jsonl(ROWS[:1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no questions.*MIT"),
        ("problem,answer\n", "holds no questions.*MIT"),
        (GOOD + "{", "line 2: .*expected one JSON object"),
        (GOOD + '{"problem": ' + "[" * 30_000, "line 2: .*expected one JSON object"),
        (GOOD + '{"problem": "a"}', "line 2: .*expected"),
        (GOOD + '{"problem": "", "answer": "7"}', "line 2: .*expected"),
        (GOOD + '{"problem": ["a"], "answer": "7"}', "line 2: .*expected"),
        (GOOD + '{"problem": "\\ud800", "answer": "7"}', "line 2: .*expected"),
        (GOOD + '{"problem": "a", "answer": ["7"], "solution": "\\\\boxed{7}"}', "line 2: .*expected"),
        (GOOD + '{"problem": "a", "solution": "it is 7"}', "line 2: .*expected"),
        (GOOD + '{"problem": "a", "solution": "it is \\\\boxed{7"}', "line 2: .*expected"),
        (GOOD + '{"problem": "a", "solution": "it is \\\\boxed{ }"}', "line 2: .*expected"),
        (GOOD + '{"problem": "a", "answer": "' + "x" * 257 + '"}', "line 2: .*an answer of at most 256 bytes"),
        (GOOD + "[1]", "line 2: .*expected"),
        ("question,answer\na,7\n", "line 1: .*expected a CSV header with problem"),
        ("problem,answer\na,7\nb\n", "line 3: .*expected 2 fields"),
        ('problem,answer\n"a,7\n', "line 2: .*expected comma-separated values"),
        (b"PAR1\xff\xfe", "line 1: .*expected UTF-8"),
    ],
)
def test_bad_files(tmp_path, content, message):
    with pytest.raises(UserError, match=message) as caught:
        math.read(write(tmp_path, content), CONFIG)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(("split", "key"), [("train", "train"), ("validation", "train"), ("test", "test")])
def test_files_must_be_named_and_exist(split, key):
    source = "https://github.com/hendrycks/math.*https://github.com/openai/prm800k.*MIT"
    with pytest.raises(UserError, match=rf'task\.{key}_file = "": .*{source}'):
        math.examples(CONFIG, split)
    with pytest.raises(UserError, match=f"'/none/x.jsonl': No such file.*{source}"):
        math.examples(dataclasses.replace(CONFIG, **{f"{key}_file": "/none/x.jsonl"}), split)


# ---- splits


def test_training_leaves_out_what_is_tested_and_validated(tmp_path):
    rows = [{"problem": f"What is {n}  + 1?", "answer": str(n + 1)} for n in range(100)]
    tested = [{"problem": f"What is {n}\n+ 1?", "answer": str(n + 1)} for n in range(30)]
    config = TaskConfig(name="math", train_file=write(tmp_path, jsonl(rows), "all"), validation_size=20)
    prompts = lambda config, split: {example.prompt for example in math.examples(config, split)}  # noqa: E731

    train, held = prompts(config, "train"), prompts(config, "validation")
    assert (len(train), len(held), len(train & held)) == (80, 20, 0)
    config = dataclasses.replace(config, test_file=write(tmp_path, jsonl(tested), "test"))
    train, held = prompts(config, "train"), prompts(config, "validation")
    assert (len(train), len(held), len(train & held)) == (50, 20, 0)
    assert all(int(prompt.split()[2]) >= 30 for prompt in train | held)
    assert len(prompts(config, "test")) == 30
    assert prompts(dataclasses.replace(config, seed=5), "validation") == held

    own = dataclasses.replace(config, validation_file=write(tmp_path, jsonl(rows[30:40]), "own"))
    assert (len(prompts(own, "train")), len(prompts(own, "validation"))) == (60, 10)
    with pytest.raises(UserError, match=r"task\.train_file = .*all its questions are in .*test"):
        math.examples(dataclasses.replace(config, train_file=config.test_file), "train")
    with pytest.raises(UserError, match=r"task\.validation_size = 70: .* holds 70 questions outside the test file"):
        math.examples(dataclasses.replace(config, validation_size=70), "train")
    with pytest.raises(UserError, match="data split 'dev'"):
        math.examples(config, "dev")


# ---- prompts and demonstrations


def test_prompts(tmp_path):
    path = write(tmp_path, jsonl([{"problem": "Is {this} 7?", "answer": "7"}]))
    prompt = lambda name: math.read(path, dataclasses.replace(CONFIG, prompt=name))[0].prompt  # noqa: E731
    assert prompt("compact") == "Is {this} 7?\n"
    assert prompt("instruct").startswith("Is {this} 7?\n")
    assert prompt("instruct").endswith("<answer>\\boxed{\\frac{3}{4}}</answer>")
    assert prompt("published") == (
        "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n\n\n"
        "You are a math expert. You will be given a question to solve. Solve it step by step. "
        "Wrap the final answer in a \\boxed{}. \n\nIs {this} 7?"
    )
    assert prompt("published_evaluation") == (
        "You are a math expert. You will be given a question to solve. Solve it step by step. Wrap the final answer in a "
        "\\boxed{}.\nRespond in the following format:\n<reasoning>\nYour reasoning here\n</reasoning>\n<answer>\n"
        '\\boxed{...}\n</answer>" \n\n\nIs {this} 7?'
    )


def test_demonstrations(tmp_path):
    path = write(tmp_path, jsonl(ROWS[:1]))
    read = lambda **keys: math.read(path, dataclasses.replace(CONFIG, **keys))[0].demonstration  # noqa: E731
    assert read() == r"<answer>\boxed{7}</answer>"
    solution = "We have\n$3+4=\\boxed{7}$."
    assert read(demonstration="solution") == solution + "\n<answer>\\boxed{7}</answer>"
    published = read(demonstration="solution", prompt="published")
    assert published == f"<reasoning>\n{solution}\n</reasoning>\n<answer>\n\\boxed{{7}}\n</answer>\n"
    assert TASKS["published"].grade_text(published, math.features("7"))["reward"] == 3.0
    alone = write(tmp_path, jsonl([{"problem": "a", "answer": "7"}]), "alone")
    (example,) = math.read(alone, dataclasses.replace(CONFIG, demonstration="solution"))
    assert example.demonstration == r"<answer>\boxed{7}</answer>"


# ---- features, grading, figures


def test_features_hold_the_true_answer():
    for truth in (r"\frac{π}{2}", {"answer": r" \frac{π}{2} "}):
        (name, array) = next(iter(math.features(truth).items()))
        assert (name, array.shape, array.dtype) == ("text", (256,), np.int32)
        assert math.truth_of({name: array}) == r"\frac{π}{2}"
    assert math.truth_of(math.features("x" * 256)) == "x" * 256
    for truth in ("", " ", "x" * 257, "π" * 129):
        with pytest.raises(UserError, match="expected an expression of 1 to 256 bytes"):
            math.features(truth)


def test_rewards_that_the_settings_name():
    truth = math.features(r"\frac{1}{2}")
    assert TASKS["exact"].components == math.COMPONENTS == ("reward", "correct", "format")
    assert TASKS["published"].components == math_published.COMPONENTS
    assert TASKS["exact"].grade_text(r"\boxed{\frac{2}{4}}", truth) == {"reward": 1.0, "correct": 1.0, "format": 1.0}
    assert TASKS["published"].grade_text(r"\boxed{\frac{2}{4}}", truth)["reward"] == 0.5
    shared = math.configure(dataclasses.replace(CONFIG, format_share=0.25))
    assert shared.grade_text(r"\boxed{3}", truth)["reward"] == 0.25
    assert shared.worker == ("math", "exact", "0.25") and TASKS["published"].worker == ("math", "published", "0.0")
    assert math.TASK.grade_bytes is None


@pytest.mark.parametrize("reward", list(TASKS))
def test_worker_processes_agree(reward):
    task = TASKS[reward]
    cases = [
        (r"<answer>\boxed{0.5}</answer>", r"\frac{1}{2}"),
        (r"\boxed{9^{9^{9^9}}}", "9"),
        ("", "π"),
        (r"\boxed{7\pi}", "7π"),
    ]
    requests = [task.request(text, math.features(truth)) for text, truth in cases]
    with GraderPool(task.worker, 30.0, 1) as pool:
        verdicts = pool.grade(requests)
    expected = [task.grade_text(text, math.features(truth)) for text, truth in cases]
    assert [verdict.values for verdict in verdicts] == expected
    assert [row["correct"] for row in expected] == [1, 0, 0, float(reward == "exact")]


@pytest.mark.parametrize("reward", list(TASKS))
def test_summary(tmp_path, reward):
    task = TASKS[reward]
    examples = math.read(write(tmp_path, jsonl(ROWS)), CONFIG)
    texts = ["<answer>7</answer>", r"\boxed{\frac{2}{4}}", r"\boxed{1,200}"]
    rows = [task.grade_text(text, example.features) for text, example in zip(texts, examples, strict=True)]
    figures = task.summarize(rows, examples)
    assert figures["accuracy"] == figures["exact"] == pytest.approx({"exact": 1, "published": 1 / 3}[reward])
    assert set(figures) == {"accuracy", "exact", *task.components} - {"reward", "correct"}
    without = dict.fromkeys(task.components, float("nan"))
    assert task.summarize([without, *rows[1:]], examples)["accuracy"] == pytest.approx(
        {"exact": 2 / 3, "published": 1 / 3}[reward]
    )
    with pytest.raises(UserError, match="2 graded rows for 3 examples"):
        task.summarize(rows[:2], examples)
    with pytest.raises(UserError, match="0 graded rows"):
        task.summarize([], [])
