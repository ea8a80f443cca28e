"""Countdown: verdicts, hostile texts, items, demonstrations and figures."""

import itertools
import json
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from test_tasks_bytes import grade_on_device

from dmpo_jax.errors import UserError
from dmpo_jax.tasks import Example, TaskConfig, get_task
from dmpo_jax.tasks.countdown import features
from dmpo_jax.tasks.countdown_items import Node, draw_items, join, leaf, solve, wrong_expression
from dmpo_jax.tasks.expression import MAX_DEPTH, parse

TASK = get_task("countdown")
SHARED = Path(__file__).resolve().parents[2] / "shared"
WIDTH = 512


def tag(answer):
    return f"<answer>{answer}</answer>"


# (text, numbers, target, reward, format)
CASES = [
    # numbers: each given number exactly once, as a multiset
    (tag("3+4"), [3, 4], 7, 1, 1),
    (tag("4+3"), [3, 4], 7, 1, 1),
    (tag("5+2"), [3, 4], 7, 0, 1),
    (tag("7"), [3, 4], 7, 0, 1),
    (tag("3+4+0"), [3, 4], 7, 0, 1),
    (tag("3+4*1"), [3, 4], 7, 0, 1),
    (tag("81*1"), [1, 81, 1, 1], 81, 0, 1),
    (tag("81*1*1*1"), [1, 81, 1, 1], 81, 1, 1),
    (tag("81*1*1*1*1"), [1, 81, 1, 1], 81, 0, 1),
    (tag("3+3+1"), [3, 1, 1], 7, 0, 1),
    (tag("34"), [3, 4], 34, 0, 1),
    (tag("03+4"), [3, 4], 7, 1, 1),
    (tag("0*5+7"), [0, 5, 7], 7, 1, 1),
    (tag("5+7"), [0, 5, 7], 12, 0, 1),
    (tag("7"), [7], 7, 1, 1),
    # exact values
    (tag("8/3*3"), [8, 3, 3], 8, 1, 1),
    (tag("1/3+2/3"), [1, 3, 2, 3], 1, 1, 1),
    (tag("7/2"), [7, 2], 3, 0, 1),
    (tag("7/2"), [7, 2], 4, 0, 1),
    (tag("8/(3-8/3)"), [8, 3, 8, 3], 24, 1, 1),
    (tag("100*100*100"), [100, 100, 100], 1_000_000, 1, 1),
    (tag("3-4"), [3, 4], 1, 0, 1),
    (tag("3-4"), [3, 4], -1, 1, 1),
    (tag("2-3-4"), [2, 3, 4], -5, 1, 1),
    (tag("8/4/2"), [8, 4, 2], 1, 1, 1),
    (tag("2+3*4"), [2, 3, 4], 14, 1, 1),
    (tag("(2+3)*4"), [2, 3, 4], 20, 1, 1),
    (tag("((2)+(3))*((4))"), [2, 3, 4], 20, 1, 1),
    # division by zero, also where it cancels
    (tag("5/(3-3)"), [5, 3, 3], 1, 0, 1),
    (tag("0/(3-3)"), [0, 3, 3], 0, 0, 1),
    (tag("1/(5/(3-3))"), [1, 5, 3, 3], 0, 0, 1),
    (tag("(3-3)/5"), [3, 3, 5], 0, 1, 1),
    # signs
    (tag("-3+7"), [3, 7], 4, 1, 1),
    (tag("4--3"), [4, 3], 7, 1, 1),
    (tag("4*-3"), [4, 3], -12, 1, 1),
    (tag("4/-2+9"), [4, 2, 9], 7, 1, 1),
    (tag("-(3-4)"), [3, 4], 1, 1, 1),
    (tag("7-(-3)"), [7, 3], 10, 1, 1),
    (tag("--3+4"), [3, 4], 7, 0, 0),
    (tag("4---3"), [4, 3], 1, 0, 0),
    (tag("+3+4"), [3, 4], 7, 0, 0),
    (tag("3++4"), [3, 4], 7, 0, 0),
    (tag("3-"), [3], 3, 0, 0),
    # other operators, numerals and forms
    (tag("2**3"), [2, 3], 8, 0, 0),
    (tag("2^3"), [2, 3], 8, 0, 0),
    (tag("7//2"), [7, 2], 3, 0, 0),
    (tag("7/ /2"), [7, 2], 3, 0, 0),
    (tag("7%4"), [7, 4], 3, 0, 0),
    (tag("1.5*4"), [1, 5, 4], 6, 0, 0),
    (tag("1,5"), [1, 5], 6, 0, 0),
    (tag("1_0+5"), [10, 5], 15, 0, 0),
    (tag("1e1+5"), [10, 5], 15, 0, 0),
    (tag("0x3+4"), [3, 4], 7, 0, 0),
    (tag("٣+4"), [3, 4], 7, 0, 0),
    (tag("3²"), [3, 2], 9, 0, 0),
    (tag("(3)(4)"), [3, 4], 12, 0, 0),
    (tag("3(4)"), [3, 4], 12, 0, 0),
    (tag("3 4"), [3, 4], 7, 0, 0),
    (tag("1 0+5"), [10, 5], 15, 0, 0),
    (tag("()"), [3, 4], 7, 0, 0),
    (tag("(1+2"), [1, 2], 3, 0, 0),
    (tag("1+2)"), [1, 2], 3, 0, 0),
    (tag(")1+2("), [1, 2], 3, 0, 0),
    (tag("[1+2]"), [1, 2], 3, 0, 0),
    (tag("{1+2}"), [1, 2], 3, 0, 0),
    (tag("**3+4**"), [3, 4], 7, 0, 0),
    (tag("x=3+4"), [3, 4], 7, 0, 0),
    (tag("the answer is 3+4"), [3, 4], 7, 0, 0),
    (tag("3+4."), [3, 4], 7, 0, 0),
    (tag("__import__('os').system('echo hi')"), [3, 4], 7, 0, 0),
    (tag("3+4\0"), [3, 4], 7, 0, 0),
    (tag("3+4�"), [3, 4], 7, 0, 0),
    (tag("1000000000+5"), [10, 5], 15, 0, 0),
    (tag("000000003+4"), [3, 4], 7, 1, 1),
    (tag("0000000003+4"), [3, 4], 7, 0, 0),
    (tag("(" * MAX_DEPTH + "3" + ")" * MAX_DEPTH + "+4"), [3, 4], 7, 1, 1),
    (tag("(" * (MAX_DEPTH + 1) + "3" + ")" * (MAX_DEPTH + 1) + "+4"), [3, 4], 7, 0, 0),
    # LaTeX and Unicode operators
    (tag(r"3 \times 4"), [3, 4], 12, 1, 1),
    (tag(r"3\cdot4"), [3, 4], 12, 1, 1),
    (tag(r"8 \div 4"), [8, 4], 2, 1, 1),
    (tag("3×4"), [3, 4], 12, 1, 1),
    (tag("3·4"), [3, 4], 12, 1, 1),
    (tag("3⋅4"), [3, 4], 12, 1, 1),
    (tag("3∗4"), [3, 4], 12, 1, 1),
    (tag("8÷4"), [8, 4], 2, 1, 1),
    (tag("8∕4"), [8, 4], 2, 1, 1),
    (tag("8−4"), [8, 4], 4, 1, 1),
    (tag(r"\left(1+2\right)\,\times\,3"), [1, 2, 3], 9, 1, 1),
    (tag(r"1\,0+5"), [10, 5], 15, 0, 0),
    (tag(r"3\timesx4"), [3, 4], 12, 0, 0),
    (tag(r"3\cdots4"), [3, 4], 12, 0, 0),
    (tag(r"3 \times\times 4"), [3, 4], 12, 0, 0),
    (tag(r"3\\,+4"), [3, 4], 7, 0, 0),
    (tag(r"\frac{8}{4}"), [8, 4], 2, 0, 0),
    (tag("3+4\\"), [3, 4], 7, 0, 0),
    # a claimed value
    (tag("3+4=7"), [3, 4], 7, 1, 1),
    (tag("3 + 4 = 7\n"), [3, 4], 7, 1, 1),
    (tag("3-4=-1"), [3, 4], -1, 1, 1),
    (tag("3+4=8"), [3, 4], 7, 0, 1),
    (tag("3+4=8"), [3, 4], 8, 0, 1),
    (tag("3+4="), [3, 4], 7, 0, 0),
    (tag("=7"), [3, 4], 7, 0, 0),
    (tag("7=3+4"), [3, 4], 7, 0, 0),
    (tag("3+4=7=7"), [3, 4], 7, 0, 0),
    (tag("3+4=7.0"), [3, 4], 7, 0, 0),
    (tag("3+4=7-"), [3, 4], 7, 0, 0),
    (tag("3+4=--7"), [3, 4], 7, 0, 0),
    (tag("3+4=(7)"), [3, 4], 7, 0, 0),
    (tag("3+(4=7)"), [3, 4], 7, 0, 0),
    # wrappers round the whole answer
    (tag(r"\boxed{3+4}"), [3, 4], 7, 1, 1),
    (tag("\n\\boxed{3 + 4}\n"), [3, 4], 7, 1, 1),
    (tag(r"\boxed{3+4=7}"), [3, 4], 7, 1, 1),
    (tag(r"$3+4$"), [3, 4], 7, 1, 1),
    (tag(r"\[ \boxed{3+4} \]"), [3, 4], 7, 1, 1),
    (tag(r"\boxed{3}+\boxed{4}"), [3, 4], 7, 0, 0),
    (tag(r"\boxed{3+4}=7"), [3, 4], 7, 0, 0),
    (tag(r"\boxed{3+4"), [3, 4], 7, 0, 0),
    (tag(r"\boxed{\boxed{3+4}}"), [3, 4], 7, 0, 0),
    (tag(r"\boxed{}"), [3, 4], 7, 0, 0),
    # where the answer is
    ("", [3, 4], 7, 0, 0),
    ("3+4", [3, 4], 7, 0, 0),
    (r"\boxed{3+4}", [3, 4], 7, 0, 0),
    ("<answer>3+4", [3, 4], 7, 0, 0),
    ("3+4</answer>", [3, 4], 7, 0, 0),
    ("</answer>3+4<answer>", [3, 4], 7, 0, 0),
    (tag(""), [3, 4], 7, 0, 0),
    (tag(" \n "), [3, 4], 7, 0, 0),
    ("<reasoning>3+4 = 7</reasoning>" + tag("1+1"), [3, 4], 7, 0, 1),
    (tag("1+1") + " wait " + tag("3+4"), [3, 4], 7, 1, 1),
    (tag("3+4") + " wait " + tag("1+1"), [3, 4], 7, 0, 1),
    (tag("3+4") + "<answer>1+1", [3, 4], 7, 1, 1),
    (tag("3+4") + "<|eot_id|><|endoftext|>", [3, 4], 7, 1, 1),
    (tag("3+4") + "<|eot_id|>junk " + tag("1+1"), [3, 4], 7, 1, 1),
    ("<|im_end|>" + tag("3+4"), [3, 4], 7, 0, 0),
    (tag("3+4" + " " * 253), [3, 4], 7, 1, 1),
    (tag("3+4" + " " * 254), [3, 4], 7, 0, 0),
]


@pytest.mark.parametrize(("text", "numbers", "target", "reward", "form"), CASES)
def test_verdict_on_host(text, numbers, target, reward, form):
    truth = TASK.features({"numbers": numbers, "target": target})
    assert TASK.grade_text(text, truth) == {"reward": reward, "format": form}


def device_grades(texts, truths):
    width = max(len(truth["numbers"]) for truth in truths)
    return grade_on_device(TASK, texts, [features(truth, width) for truth in truths], WIDTH)


def test_verdicts_on_device():
    truths = [{"numbers": numbers, "target": target} for _, numbers, target, _, _ in CASES]
    graded = device_grades([case[0].encode() for case in CASES], truths)
    for case, got in zip(CASES, graded, strict=True):
        assert got == {"reward": case[3], "format": case[4]}, case


def test_shared_cases():
    path = SHARED / "cases" / "graders.jsonl"
    if not path.exists():
        pytest.skip("../shared/cases is absent")
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    cases = [case for case in cases if case["task"] == "countdown"]
    assert cases
    texts, truths = [case["completion"] for case in cases], [case["truth"] for case in cases]
    on_device = device_grades([text.encode() for text in texts], truths)
    for case, device in zip(cases, on_device, strict=True):
        assert TASK.grade_text(case["completion"], TASK.features(case["truth"]))["reward"] == case["verdict"], case
        assert device["reward"] == case["verdict"], case


def test_published_generations():
    """d1's own parser finds 50 right of these 256 outputs; 10 of them lack a complete answer tag."""
    paths = sorted((SHARED / "data" / "generations").glob("countdown_*.json"))
    if not paths:
        pytest.skip("../shared/data/generations is absent")
    items = [item for path in paths for item in json.loads(path.read_text())["generations"]]
    truths = [dict(zip(("numbers", "target"), item["ground_truth"], strict=True)) for item in items]
    texts = [item["generations"] for item in items]
    host = [TASK.grade_text(text, TASK.features(truth)) for text, truth in zip(texts, truths, strict=True)]
    device = grade_on_device(TASK, [text.encode() for text in texts], [features(truth, 3) for truth in truths], 4096)
    assert host == device
    assert (len(host), sum(row["reward"] for row in host), sum(row["format"] for row in host)) == (
        256,
        40,
        193,
    )


HOSTILE = {
    "power tower": "9**9" * 2500,
    "deep brackets": "(" * 5000 + "1" + ")" * 5000,
    "brackets in the limit": "(" * 128 + ")" * 128,
    "huge integer": "9" * 10_000,
    "many divisions": "/".join(["999999999"] * 1000),
    "longest graded": "/".join(["99999"] * 42),
    "sums of fractions": "+".join(["1/7777"] * 36),
    "minus signs": "-" * 10_000,
    "tags": "<answer>" * 1250,
    "closing tags": "</answer>" * 1111,
    "end tokens": "<|eot_id|" * 1111,
    "boxes": r"\boxed{" * 1400,
    "dollars": "$" * 10_000,
    "replacement characters": "�" * 3300,
    "lone surrogates": "\ud800" * 3300,
    "nul": "\0" * 10_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_takes_under_ten_milliseconds(kind):
    truth = TASK.features({"numbers": [3, 4], "target": 7})
    for text in (HOSTILE[kind], tag(HOSTILE[kind]), tag(HOSTILE[kind][:256])):
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            graded = TASK.grade_text(text, truth)
            seconds.append(time.perf_counter() - start)
        assert graded["reward"] == 0
        assert min(seconds) < 0.010


def test_invalid_utf8_in_the_answer_is_malformed_on_both_sides():
    truth = {"numbers": [3, 4], "target": 7}
    for junk in (b"\xff", b"\xc3", b"\xe2\x88", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"):
        raws = [b"<answer>3" + junk + b"+4</answer>", junk + b"<answer>3+4</answer>" + junk]
        expected = [{"reward": 0, "format": 0}, {"reward": 1, "format": 1}]
        host = [TASK.grade_text(raw.decode("utf-8", "replace"), TASK.features(truth)) for raw in raws]
        assert host == expected
        assert device_grades(raws, [truth] * 2) == expected


def test_device_is_exact_at_the_largest_values_allowed():
    """8 * 99 * 100 * 100 * 100 = 7.9e8 < 2^31; fractions whose cross products come near that."""
    truths, texts = [], []
    for expression in (
        "99/100+99/100+0",
        "100*100*100*99",
        "1/(99/100-100/99)",
        "100/99+100/99",
        "-99*100*100*-100",
    ):
        numbers = parse(expression.encode()).numbers
        value = Fraction(parse(expression.encode()).numerator, parse(expression.encode()).denominator)
        for target in (value.numerator, value.numerator // value.denominator):
            truths.append({"numbers": numbers, "target": target})
            texts.append(tag(expression))
    expected = [TASK.grade_text(text, TASK.features(truth)) for text, truth in zip(texts, truths, strict=True)]
    assert device_grades([text.encode() for text in texts], truths) == expected
    assert any(row["reward"] for row in expected)


@pytest.mark.parametrize(
    ("numbers", "target"),
    [([100_000, 100_000], 1), ([99] * 5, 1), ([3, 4], 2**31), ([], 1), ([-3, 4], 1), ([2**30, 2], 7)],
)
def test_features_refuse_what_int32_cannot_hold(numbers, target):
    with pytest.raises(UserError, match=r"2\^31"):
        TASK.features({"numbers": numbers, "target": target})


def test_features_are_fixed_shape_int32():
    made = features({"numbers": [5, 6], "target": 11}, width=4)
    assert {key: value.tolist() for key, value in made.items()} == {
        "numbers": [5, 6, 0, 0],
        "count": 2,
        "target": 11,
    }
    assert all(value.dtype == np.int32 for value in made.values())


# ---- items


def evaluate(text):
    parsed = parse(text.encode())
    return parsed.numbers, Fraction(parsed.numerator, parsed.denominator)


def test_join_writes_only_the_brackets_that_it_needs():
    one, two, three = leaf(1), leaf(2), leaf(3)
    both = join(one, "-", two)
    assert both == Node(-1, 1, "1-2", 0)
    assert join(both, "+", three).text == "1-2+3"
    assert join(three, "-", both).text == "3-(1-2)"
    assert join(both, "*", three).text == "(1-2)*3"
    assert join(three, "/", join(one, "*", two)).text == "3/(1*2)"
    assert join(join(one, "*", two), "/", three).text == "1*2/3"
    assert join(one, "/", join(two, "-", two)) is None


@pytest.mark.parametrize(
    ("numbers", "target"),
    [([3, 4], 7), ([8, 3, 8, 3], 24), ([5, 5, 5, 1], 24), ([2, 7], 5), ([1, 81, 1, 1], 81)],
)
def test_solve_finds_an_expression(numbers, target):
    used, value = evaluate(solve(numbers, target))
    assert sorted(used) == sorted(numbers)
    assert value == target


def test_solve_returns_none_where_there_is_no_expression():
    assert solve([1, 1, 1], 100) is None
    assert solve([1, 1, 1, 1], 24) is None


def test_solve_agrees_with_all_bracketings_of_three_numbers():
    for numbers in ([2, 3, 7], [1, 1, 6], [4, 4, 5]):
        reachable = set()
        for a, b, c in itertools.permutations(numbers):
            for p, q in itertools.product("+-*/", repeat=2):
                for text in (f"({a}{p}{b}){q}{c}", f"{a}{p}({b}{q}{c})"):
                    parsed = parse(text.encode())
                    if parsed.denominator:
                        reachable.add(Fraction(parsed.numerator, parsed.denominator))
        assert {t for t in range(-20, 100) if solve(numbers, t)} == {t for t in range(-20, 100) if t in reachable}


def test_wrong_expression_uses_the_numbers_and_misses():
    rng = np.random.default_rng(0)
    for _ in range(50):
        used, value = evaluate(wrong_expression([3, 4, 5], 12, rng))
        assert sorted(used) == [3, 4, 5]
        assert value != 12
    assert wrong_expression([7], 7, rng) is None


def test_drawn_items_are_solved_distinct_and_follow_the_recipe():
    items = draw_items("train", 3000, np.random.default_rng(0))
    keys = {(*sorted(numbers), target) for numbers, target, _ in items}
    assert len(keys) == len(items) == 3000
    for numbers, target, text in items:
        used, value = evaluate(text)
        assert sorted(used) == sorted(numbers)
        assert value == target
        assert 1 <= target <= 100
    # Share solvable with + and - alone: 0.897 for this recipe, 0.895 in the published test file.
    sums = np.mean([any(a + s * b + t * c in (n, -n) for s in (1, -1) for t in (1, -1)) for (a, b, c), n, _ in items])
    assert abs(sums - 0.897) < 0.02
    assert abs(np.mean([n for numbers, _, _ in items for n in numbers]) - 50.5) < 1.0


def test_splits_share_no_item_whatever_the_seed():
    keys = {}
    for split, size in (("train", 3000), ("validation", 500), ("test", 500)):
        for seed in (0, 1):
            config = TaskConfig(name="countdown", seed=seed, **{f"{split}_size": size})
            items = {
                (*sorted(example.features["numbers"].tolist()), int(example.features["target"]))
                for example in TASK.examples(config, split)
            }
            assert len(items) == size
            keys.setdefault(split, set()).update(items)
    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["validation"]
    assert not keys["validation"] & keys["test"]


def as_text(examples):
    return [(e.prompt, e.demonstration, e.truth, {k: v.tolist() for k, v in e.features.items()}) for e in examples]


def test_examples_are_a_function_of_config_and_split():
    config = TaskConfig(name="countdown", train_size=50, careless=0.5)
    assert as_text(TASK.examples(config, "train")) == as_text(TASK.examples(config, "train"))
    other = TaskConfig(name="countdown", train_size=50, careless=0.5, seed=1)
    assert as_text(TASK.examples(config, "train")) != as_text(TASK.examples(other, "train"))
    longer = TaskConfig(name="countdown", train_size=80, careless=0.5)
    assert as_text(TASK.examples(longer, "train"))[:50] == as_text(TASK.examples(config, "train"))
    with pytest.raises(UserError, match="split"):
        TASK.examples(config, "dev")


def test_prompts_and_demonstrations():
    example = TASK.examples(TaskConfig(name="countdown"), "test")[0]
    listed = ",".join(map(str, example.features["numbers"]))
    assert example.prompt == f"{listed}:{example.features['target']}="
    assert example.demonstration == f"<answer>{example.truth}</answer>"
    assert TASK.grade_text(example.demonstration, example.features)["reward"] == 1
    asked = TASK.examples(TaskConfig(name="countdown", prompt="instruct"), "test")[0]
    assert listed.replace(",", ", ") in asked.prompt
    assert "<answer>" in asked.prompt


def test_careless_share_of_demonstrations_is_wrong_but_well_formed():
    examples = TASK.examples(TaskConfig(name="countdown", train_size=2000, careless=0.6), "train")
    graded = [TASK.grade_text(e.demonstration, e.features) for e in examples]
    assert all(row["format"] == 1 for row in graded)
    assert abs(np.mean([1 - row["reward"] for row in graded]) - 0.6) < 0.04
    assert all(TASK.grade_text(tag(e.truth), e.features)["reward"] == 1 for e in examples)


def test_summarize():
    truths = [([3, 4], 7), ([3, 4], 12), ([1, 2, 9], 6), ([4, 3], 1)]
    examples = [Example("", "", "", features({"numbers": n, "target": t}, 3)) for n, t in truths]
    grades = ((1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 1.0))
    rows = [{"reward": reward, "format": form} for reward, form in grades]
    # 3+4 = 7, 9-2-1 = 6 and 4-3 = 1 are sums; 12 needs a product.
    assert TASK.summarize(rows, examples) == {
        "accuracy": 0.5,
        "exact": 0.5,
        "format": 0.75,
        "solvable_by_sums": 0.75,
    }
    with pytest.raises(UserError, match="graded rows"):
        TASK.summarize(rows[:2], examples)


def test_published_test_file_figures():
    """229 of d1's 256 items are solvable with + and - alone; all are solvable."""
    path = SHARED / "data" / "countdown" / "d1_test.jsonl"
    if not path.exists():
        pytest.skip("../shared/data/countdown is absent")
    examples = TASK.read(str(path), TaskConfig(name="countdown"))
    rows = [TASK.grade_text(example.demonstration, example.features) for example in examples]
    assert TASK.summarize(rows, examples) == {
        "accuracy": 1.0,
        "exact": 1.0,
        "format": 1.0,
        "solvable_by_sums": 229 / 256,
    }
