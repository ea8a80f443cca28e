"""GSM8K: where the answer is, how it is read, the published rewards, and host and device giving the same verdicts."""

import dataclasses
import functools
import json
import random
import re
import time
from fractions import Fraction

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from test_tasks_bytes import pack

from dmpo_jax.errors import UserError
from dmpo_jax.tasks import TaskConfig, get_task, gsm8k_published
from dmpo_jax.tasks.gsm8k_files import read_items
from dmpo_jax.tasks.question_files import held_out

CONFIG = TaskConfig(name="gsm8k", validation_size=1)
TASKS = {reward: get_task("gsm8k", dataclasses.replace(CONFIG, reward=reward)) for reward in ("exact", "published")}
BATCH, WIDTH = 1000, 320


@functools.cache
def on_device(reward):
    return jax.jit(TASKS[reward].grade_bytes)


def grade(reward, cases):
    """(host, device) components `{name: float32[N]}` of (raw bytes, truth) pairs, by one compiled program."""
    task, host, device = TASKS[reward], [], []
    for start in range(0, len(cases), BATCH):
        chunk = cases[start : start + BATCH]
        features = [task.features(truth) for _, truth in chunk]
        host += [
            task.grade_text(raw.decode("utf-8", "replace"), item)
            for (raw, _), item in zip(chunk, features, strict=True)
        ]
        filled = [*chunk, *[(b"", "0")] * (BATCH - len(chunk))]
        features += [task.features("0")] * (BATCH - len(chunk))
        stacked = {key: np.stack([item[key] for item in features]) for key in features[0]}
        graded = on_device(reward)(*pack([raw for raw, _ in filled], WIDTH), stacked)
        device.append({key: np.array(value)[: len(chunk)] for key, value in graded.items()})
    names = task.components
    return (
        {name: np.array([row[name] for row in host], np.float32) for name in names},
        {name: np.concatenate([part[name] for part in device]) for name in names},
    )


def agree(reward, cases):
    """The host's components, after asserting that the device's are the same."""
    host, device = grade(reward, cases)
    for name in TASKS[reward].components:
        assert device[name].dtype == np.float32
        wrong = np.flatnonzero(host[name] != device[name])
        assert not len(wrong), (reward, name, cases[wrong[0]], host[name][wrong[0]], device[name][wrong[0]])
    return host


# ---- the exact reward

PLACES = [
    # completion, truth, correct, format
    ("<answer>37</answer>", "37", 1, 1),
    ("<answer>\n37\n</answer>", "37", 1, 1),
    ("<reasoning>\n40 - 3\n</reasoning>\n<answer>\n37\n</answer>\n", "37", 1, 1),
    ("<think>4*9=36, so 37</think> <answer>37</answer>", "37", 1, 1),
    ("<answer>36</answer> no, <answer>37</answer>", "37", 1, 1),
    ("<answer>37</answer> or <answer>36</answer>", "37", 0, 1),
    ("<answer>37</answer> then <answer>36", "37", 1, 1),
    ("<answer>37</answer><|eot_id|><|endoftext|><|endoftext|>", "37", 1, 1),
    ("<answer>37</answer><|eot_id|> junk <answer>36</answer>", "37", 1, 1),
    ("<answer>3<|eot_id|>7</answer>", "37", 0, 0),
    ("<answer></answer>", "0", 0, 0),
    ("<answer> \n </answer>", "0", 0, 0),
    ("", "0", 0, 0),
    (r"so \boxed{37}.", "37", 1, 0),
    (r"\boxed{36} no, \boxed{37}", "37", 1, 0),
    (r"put it in \boxed at the end: \boxed{37}", "37", 1, 0),
    (r"\boxed{\boxed{37}}", "37", 1, 0),
    (r"\boxed{\text{37 {red} pens}} each", "37", 1, 0),
    (r"\boxed{37} and then \boxed{36", "37", 1, 0),
    (r"so the value is \boxed{37", "37", 0, 0),
    (r"}} \boxed{37} {{", "37", 1, 0),
    (r"<answer>\boxed{37}</answer>", "37", 1, 1),
    (r"<answer>36 + 1 gives \boxed{37}</answer>", "37", 1, 1),
    (r"<answer>\boxed{37</answer>", "37", 1, 1),
    (r"<answer>\n\boxed{37}<|eot_id|>", "37", 1, 0),
    (r"\boxed{37} <answer>36</answer>", "37", 0, 1),
    (r"\boxed{37} <answer></answer>", "37", 0, 0),
    ("#### 37", "37", 1, 0),
    ("so\n#### 37 " + "and more words " * 18, "37", 1, 0),
    ("#### 36\n#### $37.\n", "37", 1, 0),
    ("#### -37", "37", 0, 0),
    ("####", "0", 0, 0),
    ("####  \n", "0", 0, 0),
    ("#### 36 and \\boxed{37}", "37", 1, 0),
    ("It could be 36 or 37.", "37", 0, 0),
    ("The answer is 37", "37", 0, 0),
    ("so 40 - 3 = 37 and", "37", 0, 0),
]

NUMBERS = [
    # answer, truth, correct
    ("+37", "37", 1),
    ("-37", "-37", 1),
    ("-37", "37", 0),
    ("37", "-37", 0),
    ("−37", "-37", 1),
    ("- 37", "-37", 1),
    ("-$37", "-37", 1),
    ("$-37", "-37", 1),
    ("is -37", "-37", 1),
    ("(-37)", "-37", 1),
    ("--37", "37", 0),
    ("x-37", "-37", 0),
    ("37.0", "37", 1),
    ("37.", "37", 1),
    ("037", "37", 1),
    ("37.50", "37.5", 1),
    (".5", "0.5", 1),
    ("..5", "0.5", 0),
    ("-2.75", "-2.75", 1),
    ("-0", "0", 1),
    ("0.000", "0", 1),
    ("37.0000000000000000001", "37", 0),
    ("0.1", "0.1000000000000001", 0),
    ("123456789012345678", "123456789012345678", 1),
    ("123456789012345679", "123456789012345678", 0),
    ("1" + "0" * 200, "1", 0),
    ("0" * 200 + "1", "1", 1),
    ("370", "37", 0),
    ("3.7", "37", 0),
    ("3,700", "3700", 1),
    ("3700", "3,700", 1),
    ("1,234,567.25", "1234567.25", 1),
    ("3,700.", "3700", 1),
    ("3,70", "370", 0),
    ("3,7000", "37000", 0),
    ("3700,000", "3700000", 0),
    ("1,,000", "1000", 0),
    ("0.123,456", "0.123456", 0),
    ("1.2.3", "1.2", 0),
    ("$9{,}250", "9250", 1),
    (r"\$3,700", "3700", 1),
    (r"\$ 3,700", "3700", 1),
    (r"3,\!700", "3700", 1),
    (r"3\,700", "3700", 1),
    ("3\u202f700", "3700", 1),
    ("3 700", "3700", 0),
    ("€37", "37", 1),
    ("37%", "37", 1),
    (r"37\%", "37", 1),
    ("37 percent", "37", 1),
    (r"37\text{ minutes}", "37", 1),
    (r"37~\mathrm{km}", "37", 1),
    (r"$\textbf{37}$", "37", 1),
    (r"\(37\)", "37", 1),
    (r"\[ 37 \]", "37", 1),
    ("**37**", "37", 1),
    ("37 cm^2", "37", 1),
    (r"37 \text{ cm}^{2}", "37", 1),
    ("37 m²", "37", 1),
    (r"37^\circ", "37", 1),
    ("37^2", "37", 0),
    ("x^37", "37", 0),
    ("37 m ^2", "37", 0),
    ("37 eggs/day", "37", 1),
    ("37, in total,", "37", 1),
    ("37!", "37", 1),
    ("Box B has 37 more than box C.", "37", 1),
    ("the total: 37", "37", 1),
    ("40 - 3 = 37", "37", 1),
    (r"\frac{74}{2} = 37", "37", 1),
    ("x = y = 37", "37", 1),
    ("37 = 40 - 3", "37", 0),
    ("40 - 3 =", "37", 0),
    ("x >= 37", "37", 0),
    ("x != 37", "37", 0),
    ("40 - 3", "37", 0),
    ("36 or 37", "37", 0),
    ("2:37", "37", 0),
    ("3/37", "37", 0),
    ("/37", "37", 0),
    (r"\frac{37}{2}", "37", 0),
    (r"37\sqrt{2}", "37", 0),
    (r"37\pi", "37", 0),
    ("√37", "37", 0),
    ("37½", "37", 0),
    ("٣٧", "37", 0),
    ("3٧", "3", 0),
    ("thirty-seven", "37", 0),
    ("37\0", "37", 0),
    ("37|", "37", 0),
    ("1e3", "1000", 0),
    ("1e9999", "1", 0),
    ("nan", "37", 0),
    ("inf", "37", 0),
    ("-inf", "37", 0),
    ("...", "0", 0),
    (",", "0", 0),
    ("37" + " " * 254, "37", 1),
    ("37" + " " * 255, "37", 0),
]


def test_where_the_answer_is():
    host = agree("exact", [(raw.encode(), truth) for raw, truth, _, _ in PLACES])
    for index, (raw, _, correct, formed) in enumerate(PLACES):
        assert (host["correct"][index], host["format"][index]) == (correct, formed), raw
    assert host["reward"].tolist() == host["correct"].tolist()


@pytest.mark.parametrize("frame", ["<answer>{}</answer>", "\\boxed{{{}}}"])
def test_which_number_an_answer_is(frame):
    host = agree("exact", [(frame.format(answer).encode(), truth) for answer, truth, _ in NUMBERS])
    for index, (answer, truth, correct) in enumerate(NUMBERS):
        assert host["correct"][index] == correct, (answer, truth)


def test_format_share():
    task = get_task("gsm8k", dataclasses.replace(CONFIG, format_share=0.25))
    truth = task.features("37")
    texts = ["<answer>37</answer>", r"\boxed{37}", "<answer>36</answer>", "36"]
    stacked = {key: np.stack([value] * 4) for key, value in truth.items()}
    device = jax.jit(task.grade_bytes)(*pack([text.encode() for text in texts], 32), stacked)
    for index, (text, reward) in enumerate(zip(texts, [1, 0.75, 0.25, 0], strict=True)):
        host = task.grade_text(text, truth)
        assert host["reward"] == reward == device["reward"][index]
        assert host["correct"] == (index < 2)


# ---- the published rewards

ONE_LINE = "<reasoning>\n40 - 3\n</reasoning>\n<answer>\n37\n</answer>\n"
LONG = "<reasoning>\n40 - 3\nis 37\n</reasoning>\n<answer>\n37\n</answer>\n"
REWARDS = [
    # completion, truth, then exact_match, integer, strict_format, soft_format, tags
    (ONE_LINE, "37", 2, 0.5, 0.5, 0, 0.5),
    (ONE_LINE + "\n", "37", 2, 0.5, 0.5, 0, 0.498),
    (ONE_LINE + "<|eot_id|>more", "37", 2, 0.5, 0.5, 0, 0.5),
    (ONE_LINE[:-1], "37", 2, 0.5, 0, 0, 0.5 - 0.001 * (len(ONE_LINE) - 2)),
    (LONG, "37", 2, 0.5, 0, 0, 0.5),
    (ONE_LINE + "é!!", "37", 2, 0.5, 0, 0, 0.494),
    ("<reasoning>40 - 3</reasoning><answer>37</answer>", "37", 2, 0.5, 0, 0.5, 0),
    ("<reasoning>40 - 3</reasoning> \n\n <answer>37</answer> end", "37", 2, 0.5, 0, 0.5, 0),
    ("<reasoning>40</reasoning></reasoning> <answer>37</answer>", "37", 2, 0.5, 0, 0.5, 0),
    ("<reasoning>40\n</reasoning><answer>37</answer>", "37", 2, 0.5, 0, 0, 0),
    ("<reasoning>40</reasoning><answer>\n37</answer>", "37", 2, 0.5, 0, 0, 0),
    (" <reasoning>40</reasoning><answer>37</answer>", "37", 2, 0.5, 0, 0, 0),
    ("<reasoning>40</reasoning>, <answer>37</answer>", "37", 2, 0.5, 0, 0, 0),
    ("37", "37", 2, 0.5, 0, 0, 0),
    ("<answer>36</answer><answer> 37", "37", 2, 0.5, 0, 0, 0),
    ("<answer>37.0</answer>", "37", 0, 0, 0, 0, 0),
    ("<answer>$37</answer>", "37", 0, 0, 0, 0, 0),
    ("<answer>3700</answer>", "3,700", 0, 0.5, 0, 0, 0),
    ("<answer>3,700</answer>", "3,700", 2, 0, 0, 0, 0),
    ("<answer>-5</answer>", "-5", 2, 0, 0, 0, 0),
    ("<answer></answer>", "37", 0, 0, 0, 0, 0),
    ("x\n<answer>\n37\n</answer>\n</answer>\n", "37", 2, 0.5, 0, 0, 0.125 - 0.01),
    ("x\n<answer>\n37\n</answer>\n</answer>\n</answer>\n", "37", 2, 0.5, 0, 0, 0.125),
    ("x\n<answer>\n<answer>\n37\n</answer>", "37", 2, 0.5, 0, 0, 0.25 + 0.001 - 0.032),
    ("\n</reasoning>\n</reasoning>\n 37", "37", 0, 0, 0, 0, 0.125),
]

PARSED = [
    # completion, what the published evaluation reads (None: nothing)
    (r"\boxed{37}", "37"),
    (r"\boxed{ 37.50 } then \boxed{36}", "37.5"),
    (r"\boxed{70,000}", "70"),
    (r"\boxed{\$1,450}", "1"),
    (r"\boxed{\frac{1}{2}}", "1"),
    (r"\boxed{3 or 4}", "3"),
    (r"\boxed{x-4}", "-4"),
    (r"\boxed{...} \boxed{} \boxed{n} \boxed{37}", "37"),
    ("\\boxed{37\n} \\boxed{38}", "38"),
    ("\\boxed{37\n <answer>5 and 6</answer>", "6"),
    (r"\boxed{\boxed{37} 38}", "37"),
    (r"\boxed{2.5e1}", "25"),
    (r"\boxed{-1E-1}", "-0.1"),
    (r"\boxed{1e}", "1"),
    (r"\boxed{1e5e5}", "1"),
    (r"\boxed{1e99999999999999999999}", None),
    (r"\boxed{0e99999999999999999999}", "0"),
    (r"\boxed{.5}", "0.5"),
    (r"\boxed{x .5}", "5"),
    (r"\boxed{+5}", "5"),
    (r"\boxed{" + "1" * 65 + "}", None),
    (r"\boxed{" + "0" * 62 + "37}", "37"),
    ("<answer>37</answer> <answer>38</answer>", "37"),
    ("<answer>5 + 6 = 11.</answer>", "11"),
    ("<answer>1.2.3</answer>", "3"),
    ("<answer>1.2.3.4</answer>", "3.4"),
    ("<answer>v1.2.3.4.5</answer>", "5"),
    ("<answer>5-3</answer>", "-3"),
    ("<answer>5.-3.</answer>", "-3"),
    ("<answer>5..3</answer>", "3"),
    ("<answer>37", None),
    ("<answer>none</answer>", None),
    ("<answer></answer>", None),
    ("37", None),
]


def test_published_rewards():
    host = agree("published", [(raw.encode(), truth) for raw, truth, *_ in REWARDS])
    names = gsm8k_published.COMPONENTS[2:]
    for index, (raw, _, *worth) in enumerate(REWARDS):
        found = [host[name][index] for name in names]
        np.testing.assert_allclose(found, worth, atol=1e-6, err_msg=repr(raw))
        np.testing.assert_allclose(host["reward"][index], sum(worth), atol=1e-6, err_msg=repr(raw))


def test_published_evaluation():
    cases = [(raw.encode(), truth or "1") for raw, truth in PARSED]
    host = agree("published", cases)
    for index, (raw, truth) in enumerate(PARSED):
        assert host["correct"][index] == (truth is not None), (raw, gsm8k_published.parse(raw.encode()))


# ---- fuzz

FORMS = (
    "{n}", "${n}", r"\${n}", "{n}%", r"{n}\%", "{n} eggs", r"{n}\text{{ miles}}", "x = {n}", "-{n}", "+{n}", "{n}.", "{n}.0",
    "{n}.50", ".{n}", "{n}e2", "{n}/2", "{n} or {n}", r"\frac{{{n}}}{{2}}", "{n} cm^2", "**{n}**", "{n}, {n}", "{n}.{n}.{n}",
    "−{n}", "{n}\u00a0€", "1,{n}", "{n},000", "{n}" + r"\,000", "(-{n})", "é{n}", "{n}\n", "\n{n}\n", "about {n}-ish",
)  # fmt: skip
FRAMES = (
    "<answer>{a}</answer>", "<answer>\n{a}\n</answer>\n", "\\boxed{{{a}}}", "<answer>\\boxed{{{a}}}</answer>", "#### {a}\n",
    "<reasoning>\nr {n}\n</reasoning>\n<answer>\n{a}\n</answer>\n", "<reasoning>r</reasoning> <answer>{a}</answer>",
    "<answer>{n}</answer> \\boxed{{{a}}}", "\\boxed{{{n}}} \\boxed{{{a}}}", "<answer>{a}</answer><|eot_id|><answer>1</answer>",
    "{a}", "<answer>{a}", "\\boxed{{{a}",
)  # fmt: skip
PIECES = [
    *(b"<answer>", b"</answer>", b"<reasoning>", b"</reasoning>", b"\\boxed{", b"{", b"}", b"####", b"\n", b"\n</answer>\n"),
    *(b"\n<answer>\n", b"\n</reasoning>\n", b"<|eot_id|>", b"<|endoftext|>", b"1", b"0", b"7", b"00", b",", b".", b"-", b"+"),
    *(b"e", b"E5", b"e-1", b"=", b"/", b"^", b"^2", b"^{3}", b"$", b"\\$", b"\\%", b"\\!", b"\\,", b"\\", b"\\text"),
    *(b" ", b"\t", b"\0", b"\x1c", b"~", b"*", b"|", b"(", b")", b"!", b"<", b"\xc3", b"\xe2\x88", b"\xe2\x88\x92", b"\xff"),
    *(b"\xed\xa0\x80", b"\xf0\x9f", b"\xf0\x9f\x98\x80", b"\xe0\x80", b"\xc2\xb2", "٣".encode(), "½".encode(), "€".encode()),
    *(b"9" * 20, b"0" * 70, b" " * 260, b"\n</answer>\n</answer>\n", b"{" * 20, b"}" * 20, b"1.", b".2", b",000"),
]  # fmt: skip


def mutated(rng, raw):
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        at, kind = rng.randrange(len(raw) + 1), rng.randrange(4)
        if kind < 2:
            raw = raw[:at] + rng.choice(PIECES) + raw[at:]
        elif kind == 2:
            raw = raw[:at] + raw[at + rng.randrange(1, 4) :]
        else:
            raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    return raw


def fuzz_case(rng):
    number = str(rng.choice((0, 5, 7, 10, 18, 100, 999, 1000, 14000, 123456)))
    if rng.random() < 0.1:
        raw = b"".join(rng.choice(PIECES) for _ in range(rng.randrange(25)))
    else:
        answer = rng.choice(FORMS).format(n=number)
        raw = mutated(rng, rng.choice(FRAMES).format(a=answer, n=number).encode())
    truth = rng.choice((number, number, number, f"{number}.5", f"-{number}", f"{int(number):,}", "2", f"{number}000"))
    return raw[:WIDTH], truth


BLANK = r"[ \t\n\r\v\f]"


def oracle_rewards(raw, truth):
    """The published rewards by regular expressions, without bounds on time."""
    text = re.split(r"<\|(?:eot_id|endoftext|im_end|end_of_text)\|>", raw.decode("utf-8", "replace"))[0]
    given = re.match(r"(?s)(?:.*<answer>)?(.*?)(?:</answer>|\Z)", text)[1].strip(" \t\n\r\v\f")
    tags = 0
    for tag in ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>"):
        tags += 125 * (len(re.findall(re.escape(tag), text)) == 1)
    if len(re.findall("\n<answer>\n", text)) == 1:
        tags -= len(re.split("\n</answer>\n", text)[-1])
    if len(re.findall("\n</answer>", text)) == 1:
        tags -= len(re.split("\n</answer>", text)[-1]) - 1
    return {
        "exact_match": 2.0 * (given == truth),
        "integer": 0.5 * bool(re.fullmatch("[0-9]+", given)),
        "strict_format": 0.5 * bool(re.match(r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$", text)),
        "soft_format": 0.5 * bool(re.match(rf"<reasoning>.*?</reasoning>{BLANK}*<answer>.*?</answer>", text)),
        "tags": tags / 1000,
    }


def oracle_correct(raw, truth):
    """The published evaluation by regular expressions and fractions."""
    text = re.split(r"<\|(?:eot_id|endoftext|im_end|end_of_text)\|>", raw.decode("utf-8", "replace"))[0]
    contents = [content for content in re.findall(r"\\boxed\{(.*?)\}", text) if re.search("[0-9]", content)]
    tag = re.search(r"(?s)<answer>(.*?)</answer>", text)
    if not contents and not tag:
        return False
    content = (contents[0] if contents else tag[1]).strip(" \t\n\r\v\f")
    if len(content) <= 64 and re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", content):
        mantissa, _, exponent = content.lower().partition("e")
        value, power = Fraction(mantissa), int(exponent or 0)
        if value and abs(power) > 1000:
            return False
        value *= Fraction(10) ** (power if value else 0)
    else:
        numbers = re.findall(r"-?[0-9]+\.?[0-9]*", content)
        if not numbers:
            return False
        found = numbers[0 if contents else -1].removesuffix(".")
        if len(found) > 64:
            return False
        value = Fraction(found)
    return value == Fraction(truth.replace(",", ""))


def check_fuzz(count, seed):
    rng = random.Random(seed)
    cases = [fuzz_case(rng) for _ in range(count)]
    exact, published = agree("exact", cases), agree("published", cases)
    assert 0.1 < exact["correct"].mean() < 0.9  # both verdicts are well represented
    assert 0.1 < published["correct"].mean() < 0.9
    for index, (raw, truth) in enumerate(cases):
        for name, worth in oracle_rewards(raw, truth).items():
            assert abs(published[name][index] - worth) < 1e-6, (name, raw, truth)
        assert published["correct"][index] == oracle_correct(raw, truth), (raw, truth)
    for name in gsm8k_published.COMPONENTS:
        assert len(np.unique(published[name])) > 1, name


def test_graders_agree_on_mutated_answers():
    check_fuzz(3_000, 0)


@pytest.mark.slow
def test_graders_agree_on_many_mutated_answers():
    check_fuzz(100_000, 1)


MILLION = 10**6
HOSTILE = [
    "<answer>" + "9" * MILLION + "</answer>",
    "<answer>" + "9" * MILLION,
    r"\boxed{" + "{" * MILLION,
    r"\boxed{" * (MILLION // 7),
    r"\boxed{" * (MILLION // 14) + "}" * (MILLION // 14),
    "}" * MILLION + r"\boxed{1}",
    "<answer>" * (MILLION // 8),
    "<answer>1</answer>" * (MILLION // 18),
    "</answer>" * (MILLION // 9),
    "#" * MILLION,
    "#### " + " " * MILLION + "5",
    "####" + "1," * (MILLION // 2),
    "<reasoning>" + "</reasoning><answer>" * (MILLION // 20),
    "<reasoning>" + ("</reasoning>" + " " * 50 + "\n" + "<answer>") * (MILLION // 80),
    "<reasoning>" + ("</reasoning>" + " " * 500) * (MILLION // 512),
    "\n</answer>\n" * (MILLION // 11),
    "<answer>" + "1." * (MILLION // 2) + "</answer>",
    r"\boxed{" + "1-" * (MILLION // 2) + "}",
    "<answer>" + "\u0663" * MILLION + "</answer>",
    "<answer>\ud800 38 \udfff</answer>",
    "<answer>1e9999</answer> \\boxed{1e" + "9" * 4000 + "}",
    "<answer>" + "-" * MILLION + "1</answer>",
    "<|eot_id" * (MILLION // 8),
    "\x00" * MILLION,
    "<answer>nan</answer>",
    r"\boxed{-inf}",
    r"\boxed{1_000}",
]


def test_hostile_completions_are_graded_quickly():
    truth = TASKS["exact"].features("37")
    for text in HOSTILE:
        start = time.process_time()
        graded = {**TASKS["exact"].grade_text(text, truth), **TASKS["published"].grade_text(text, truth)}
        assert graded["correct"] == 0, text[:40]
        assert all(np.isfinite(value) for value in graded.values())
        assert time.process_time() - start < 5, text[:40]


def test_hostile_completions_agree_on_device():
    for reward in TASKS:
        agree(reward, [(text.encode("utf-8", "replace")[:WIDTH], "37") for text in HOSTILE])
        agree(reward, [(text.encode("utf-8", "replace")[-WIDTH:], "5") for text in HOSTILE])


@pytest.mark.parametrize("reward", list(TASKS))
def test_graders_run_inside_shard_map(reward):
    """Each device grades its rows; the result equals that of one program over all rows."""
    task, devices = TASKS[reward], jax.devices()[:8]
    cases = [fuzz_case(random.Random(seed)) for seed in range(4 * len(devices))]
    features = [task.features(truth) for _, truth in cases]
    stacked = {key: np.stack([item[key] for item in features]) for key in features[0]}
    rows, mesh = PartitionSpec("data"), Mesh(np.array(devices), ("data",))
    sharded = jax.jit(jax.shard_map(task.grade_bytes, mesh=mesh, in_specs=rows, out_specs=rows))
    found = sharded(*pack([raw for raw, _ in cases], WIDTH), stacked)
    expected = agree(reward, cases)
    assert set(found) == set(task.components)
    for name in task.components:
        np.testing.assert_array_equal(found[name], expected[name])


# ---- the true answer


def test_features():
    task = TASKS["exact"]
    found = task.features({"answer": "It is 3 * 50 = <<3*50=150>>150.\n#### 3,700"})
    assert found["digits"].tolist() == [3, 7] + [-1] * 16
    assert (found["negative"], found["exponent"]) == (0, 2)
    assert bytes(found["text"][:5].tolist()) == b"3,700"
    assert {value.dtype for value in found.values()} == {np.dtype(np.int32)}
    for same in ("3700", " 3700.0 ", "$3,700", {"answer": 3700}):
        again = task.features(same)
        assert all((again[key] == found[key]).all() for key in ("digits", "negative", "exponent"))
    assert task.features("-2.5")["exponent"] == -1


@pytest.mark.parametrize(
    "truth", ["", "none", "3/4", "1 or 2", "1" * 19, "nan", "1e3", "0" * 33, "٣", {"answer": "7 #### "}]
)
def test_a_truth_that_is_no_number_is_refused(truth):
    with pytest.raises(UserError, match=r"true answer .* expected one number"):
        TASKS["exact"].features(truth)


# ---- files

ROWS = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3+4=<<3+4=7>>7 pens\n#### 7"},
    {"question": 'Bo, "the big one", sells 1,200 cans.', "answer": "He sells 1,200.\n#### 1,200"},
    {"question": "Cy owes $5.\nWhat has he?", "answer": "#### -5"},
]


def write(tmp_path, content, name="data"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv_text(rows):
    quoted = [[row[key].replace('"', '""') for key in ("question", "answer")] for row in rows]
    return "question,answer\r\n" + "".join(f'"{question}","{answer}"\r\n' for question, answer in quoted)


@pytest.mark.parametrize("content", [jsonl(ROWS), "\ufeff" + jsonl(ROWS), csv_text(ROWS)])
def test_files_in_published_forms(tmp_path, content):
    examples = TASKS["exact"].read(write(tmp_path, content), CONFIG)
    assert [example.truth for example in examples] == ["7", "1,200", "-5"]
    assert [example.prompt for example in examples] == [row["question"] + "\n" for row in ROWS]
    for example in examples:
        for task in TASKS.values():
            assert task.grade_text(example.demonstration, example.features)["correct"] == (
                task is TASKS["exact"] or "," not in example.truth
            )


def test_an_answer_may_be_the_number_alone(tmp_path):
    path = write(tmp_path, jsonl([{"question": "a", "answer": "7"}, {"question": "b", "answer": 1200, "id": 3}]))
    assert [item.truth for _, item in read_items(path)] == ["7", "1200"]


def test_demonstrations(tmp_path):
    path = write(tmp_path, jsonl(ROWS[:1]))
    read = lambda **keys: TASKS["exact"].read(path, dataclasses.replace(CONFIG, **keys))[0].demonstration  # noqa: E731
    assert read() == "<answer>7</answer>"
    assert read(demonstration="solution") == "3+4=7 pens\n<answer>7</answer>"
    published = read(demonstration="solution", prompt="published")
    assert published == "<reasoning>\n3+4=7 pens\n</reasoning>\n<answer>\n7\n</answer>\n"
    graded = TASKS["published"].grade_text(published, TASKS["published"].features("7"))
    assert graded["reward"] == pytest.approx(2 + 0.5 + 0.5 + 0.5)


def test_prompts(tmp_path):
    path = write(tmp_path, jsonl([{"question": "Is {this} 7?", "answer": "#### 7"}]))
    prompt = lambda name: TASKS["exact"].read(path, dataclasses.replace(CONFIG, prompt=name))[0].prompt  # noqa: E731
    assert prompt("compact") == "Is {this} 7?\n"
    assert prompt("instruct").startswith("Is {this} 7?\n") and "<answer>42</answer>" in prompt("instruct")
    assert prompt("published") == (
        "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n\n\nIs {this} 7?"
    )
    assert prompt("published_evaluation") == (
        "You are a math expert. You will be given a question to solve. Solve it step by step. Wrap the final answer in a "
        "\\boxed{}. \nRespond in the following format:\n<reasoning>\nYour reasoning here\n</reasoning>\n<answer>\n"
        "\\boxed{...}\n</answer>\n\nIs {this} 7?"
    )


def test_validation_is_kept_out_of_training(tmp_path):
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(100)]
    rows.append(rows[0])  # a question that occurs twice is on one side
    config = TaskConfig(name="gsm8k", train_file=write(tmp_path, jsonl(rows)), validation_size=20)
    task = TASKS["exact"]
    train, held = ({example.prompt for example in task.examples(config, split)} for split in ("train", "validation"))
    assert not train & held
    assert (len(train), len(held)) == (80, 20)
    again = dataclasses.replace(config, seed=5, train_file=write(tmp_path, jsonl(rows[::-1]), "reversed"))
    assert {example.prompt for example in task.examples(again, "validation")} == held
    assert sum(held_out([row["question"] for row in rows], 0)) == 0
    own = dataclasses.replace(config, validation_file=write(tmp_path, jsonl(rows[:3]), "own"))
    assert len(task.examples(own, "train")) == 97  # one of the three occurs twice
    assert len(task.examples(own, "validation")) == 3
    test = dataclasses.replace(config, test_file=own.validation_file)
    assert len(task.examples(test, "test")) == 3
    with pytest.raises(UserError, match=r"task\.validation_size = 100: .* holds 101 questions"):
        task.examples(dataclasses.replace(config, validation_size=100), "train")


@pytest.mark.parametrize(("split", "key"), [("train", "train"), ("validation", "train"), ("test", "test")])
def test_files_must_be_named_and_exist(split, key):
    source = "https://github.com/openai/grade-school-math.*MIT"
    with pytest.raises(UserError, match=rf'task\.{key}_file = "": .*{source}'):
        TASKS["exact"].examples(CONFIG, split)
    with pytest.raises(UserError, match=f"'/none/x.jsonl': No such file.*{source}"):
        TASKS["exact"].examples(dataclasses.replace(CONFIG, **{f"{key}_file": "/none/x.jsonl"}), split)


GOOD = jsonl(ROWS[:1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no questions.*MIT"),
        ("question,answer\n", "holds no questions.*MIT"),
        (GOOD + "{", "line 2: .*expected one JSON object"),
        (GOOD + '{"question": ' + "[" * 30_000, "line 2: .*expected one JSON object"),
        (GOOD + '{"question": "a"}', "line 2: .*expected"),
        (GOOD + '{"question": "", "answer": "#### 7"}', "line 2: .*expected"),
        (GOOD + '{"question": ["a"], "answer": "#### 7"}', "line 2: .*expected"),
        (GOOD + '{"question": "\\ud800", "answer": "#### 7"}', "line 2: .*expected"),
        (GOOD + '{"question": "a", "answer": true}', "line 2: .*expected"),
        (GOOD + '{"question": "a", "answer": ' + "9" * 5000 + "}", "line 2: .*expected one JSON object"),
        (GOOD + "[1]", "line 2: .*expected"),
        (GOOD + '{"question": "a", "answer": "it is seven"}', "line 2: found 'it is seven', expected a number"),
        (GOOD + '{"question": "a", "answer": "7\\n#### "}', "line 2: found '', expected a number"),
        (GOOD + '{"question": "a", "answer": "#### 3/4"}', "line 2: found '3/4', expected a number"),
        (GOOD + '{"question": "a", "answer": "#### ' + "9" * 30 + '"}', "line 2: .*at most 18 digits"),
        ("prompt,answer\na,7\n", "line 1: .*expected a CSV header"),
        ("question,answer\na,7\nb\n", "line 3: .*expected 2 fields"),
        ('question,answer\n"a,7\n', "line 2: .*expected comma-separated values"),
        (b"PAR1\xff\xfe", "line 1: .*expected UTF-8"),
    ],
)
def test_bad_files(tmp_path, content, message):
    with pytest.raises(UserError, match=message) as caught:
        TASKS["exact"].read(write(tmp_path, content), CONFIG)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("path", ["a\0b", "/", "/dev/null"])
def test_paths_that_are_no_files(path):
    with pytest.raises(UserError) as caught:
        TASKS["exact"].read(path, CONFIG)
    assert "\n" not in str(caught.value)


# ---- settings and figures


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"reward": "best"}, r"task\.reward = 'best': expected one of exact, published"),
        (
            {"name": "countdown", "reward": "published"},
            r'task\.reward = "published": countdown has it on the host only',
        ),
        ({"demonstration": "long"}, r"task\.demonstration = 'long'.*answer, solution"),
        ({"prompt": "rows"}, r"task\.prompt = 'rows'.*published_evaluation"),
        ({"format_share": 1.5}, r"task\.format_share = 1\.5.*from 0 to 1"),
        ({"format_share": float("nan")}, r"task\.format_share = nan"),
        ({"format_share": 0.1, "reward": "published"}, r"task\.format_share = 0\.1: only the reward"),
        ({"format_share": 0.1, "name": "countdown"}, r"task\.format_share = 0\.1: only the reward"),
        ({"careless": 0.5}, r"task\.careless = 0\.5: gsm8k has no careless"),
    ],
)
def test_settings_out_of_range(setting, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CONFIG, **setting).validate()


def test_settings_in_range():
    CONFIG.validate()
    dataclasses.replace(CONFIG, prompt="published", reward="published", demonstration="solution").validate()
    dataclasses.replace(CONFIG, format_share=0.1).validate()
    assert TASKS["published"].components == gsm8k_published.COMPONENTS
    assert get_task("gsm8k").components == TASKS["exact"].components == ("reward", "correct", "format")


@pytest.mark.parametrize("reward", list(TASKS))
def test_summary(tmp_path, reward):
    task = TASKS[reward]
    examples = task.read(write(tmp_path, jsonl(ROWS)), CONFIG)
    texts = ["<answer>7</answer>", r"\boxed{1,200}", "<answer>5</answer>"]
    rows = [task.grade_text(text, example.features) for text, example in zip(texts, examples, strict=True)]
    figures = task.summarize(rows, examples)
    right = {"exact": 2 / 3, "published": 1 / 3}
    assert figures["accuracy"] == figures["exact"] == pytest.approx(right[reward])
    if reward == "exact":
        assert figures["format"] == pytest.approx(2 / 3)
    with pytest.raises(UserError, match="2 graded rows for 3 examples"):
        task.summarize(rows[:2], examples)
    with pytest.raises(UserError, match="0 graded rows"):
        task.summarize([], [])
