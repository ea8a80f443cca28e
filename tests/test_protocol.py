"""The protocols of an evaluation: their settings, what they change, and pass@k."""

import dataclasses
import itertools
import math
import random

import pytest

from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.intervals import wilson
from dmpo_jax.evaluation.pass_at_k import entropy, figures, pass_at_k, sizes
from dmpo_jax.evaluation.protocol import (
    BLOCK,
    EvaluationConfig,
    check_protocol,
    counted,
    model_for,
    prefill_for,
    sampler_for,
    task_for,
)
from dmpo_jax.model.parameters import ModelConfig
from dmpo_jax.tasks import TaskConfig

PUBLISHED = EvaluationConfig(protocol="published", tokens_per_step=2)


# ---- pass@k


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for correct in range(n + 1):
        right = [index < correct for index in range(n)]
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(right, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Its mean over all outcomes of n draws, each right with probability p, is 1 - (1 - p)^k."""
    n, p = 6, 0.3
    for k in (1, 2, 5):
        mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_of_many():
    assert pass_at_k(1000, 1, 1) == pytest.approx(0.001)
    assert pass_at_k(1000, 999, 2) == 1.0
    assert pass_at_k(1000, 500, 500) == 1 - 1 / math.comb(1000, 500)


@pytest.mark.parametrize(("n", "correct", "k"), [(0, 0, 1), (3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_of_impossible_counts(n, correct, k):
    with pytest.raises(ValueError, match="expected 0 <= correct <= n and 1 <= k <= n"):
        pass_at_k(n, correct, k)


def test_entropy():
    assert entropy(["a"] * 5) == 0
    assert entropy(list("abcd")) == pytest.approx(math.log(4))
    assert entropy(["a", "a", "b", "b"]) == pytest.approx(math.log(2))
    assert entropy(["a", "a", "a", "b"]) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_sizes():
    assert [sizes(n) for n in (1, 2, 3, 8, 20)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 16, 20]]


def test_figures():
    answers = [["7", "7", "5+2", ""], ["1", "2", "3", "4"]]
    correct = [[True, True, True, False], [False] * 4]
    found = figures(answers, correct)
    assert found["samples"] == 4
    assert found["pass_at"] == pytest.approx({"1": 0.375, "2": 0.5, "4": 0.5})
    assert found["pass_at_ci95"]["1"] == pytest.approx(wilson(0.75, 2))
    assert (found["distinct_answers"], found["distinct_correct"]) == (3.5, 1.0)
    assert found["answer_entropy"] == pytest.approx((entropy(answers[0]) + math.log(4)) / 2)


def test_figures_against_a_loop():
    rng = random.Random(3)
    answers = [[rng.choice("abc") for _ in range(5)] for _ in range(20)]
    correct = [[answer == "a" and rng.random() < 0.7 for answer in row] for row in answers]
    found = figures(answers, correct)
    for k in (1, 2, 4, 5):
        draws = [any(subset) for row in correct for subset in itertools.combinations(row, k)]
        assert found["pass_at"][str(k)] == pytest.approx(sum(draws) / len(draws))
    distinct = [len({a for a, good in zip(*pair, strict=True) if good}) for pair in zip(answers, correct, strict=True)]
    assert found["distinct_correct"] == sum(distinct) / 20


@pytest.mark.parametrize(
    ("answers", "correct"),
    [([["a"], ["a", "b"]], [[True], [True, False]]), ([[]], [[]]), ([], []), ([["a"]], [[True], [True]])],
)
def test_figures_need_equal_numbers(answers, correct):
    with pytest.raises(ValueError, match="expected the same number"):
        figures(answers, correct)


# ---- settings

BAD = [
    ({"every": -1}, "evaluation.every = -1: expected 0 or more"),
    ({"batch": 0}, "evaluation.batch = 0: expected 1 or more"),
    ({"samples": 0}, "evaluation.samples = 0: expected 1 or more"),
    ({"samples": 1025, "temperature": 1.0}, "evaluation.samples = 1025: expected at most 1024"),
    ({"temperature": -0.5}, "evaluation.temperature = -0.5"),
    ({"select": "first"}, "evaluation.select = 'first': expected last or best"),
    ({"protocol": "d1"}, 'evaluation.protocol = "d1": expected one of strict, published'),
    ({"tokens_per_step": 2}, 'tokens_per_step = 2: it belongs to evaluation.protocol = "published"; set sampler.steps'),
    ({"samples": 4}, "evaluation.samples = 4: greedy answers are all the same; set evaluation.temperature above 0"),
    ({"protocol": "published"}, "evaluation.tokens_per_step = 0.* needs 2 .*or 1"),
    ({"protocol": "published", "tokens_per_step": 3}, "evaluation.tokens_per_step = 3"),
    (
        {"protocol": "published", "tokens_per_step": 1, "temperature": 0.5},
        "temperature = 0.5: .* decides it; leave it out",
    ),
    ({"protocol": "published", "tokens_per_step": 1, "samples": 2}, "samples = 2: .* decides it; leave it out"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_settings_out_of_range(settings, message):
    with pytest.raises(UserError, match=message):
        EvaluationConfig(**settings).validate()


def test_settings_in_range():
    for settings in ({}, {"samples": 8, "temperature": 0.7}, {"protocol": "published", "tokens_per_step": 1}):
        EvaluationConfig(**settings).validate()


GSM8K = TaskConfig(name="gsm8k", prompt="published")


@pytest.mark.parametrize(
    ("task", "model", "length", "message"),
    [
        (
            TaskConfig(name="own", file="x.py"),
            ModelConfig(),
            256,
            'not published for task.name = "own", but for .*gsm8k',
        ),
        (
            GSM8K,
            ModelConfig(family="sdar", block_size=4),
            256,
            'model.family = "sdar", but for llada, dream; set "strict"',
        ),
        (GSM8K, ModelConfig(), 100, "completions of 100 tokens are no multiple of its blocks of 32"),
    ],
)
def test_what_the_published_protocol_does_not_know(task, model, length, message):
    with pytest.raises(UserError, match=message):
        check_protocol(PUBLISHED, task, model, length)
    check_protocol(EvaluationConfig(), task, model, length)


def test_the_published_protocol_knows():
    for model in (ModelConfig(), ModelConfig(family="dream", logits_shift=True)):
        check_protocol(PUBLISHED, GSM8K, model, 512)


# ---- what a protocol changes

OWN = SamplerConfig(algorithm="margin", block_length=16, temperature=0.9, top_k=5, top_p=0.9, confidence="filtered")


def test_strict_decodes_with_the_sampler():
    greedy = sampler_for(OWN, EvaluationConfig(), "llada", 64)
    assert greedy == SamplerConfig(algorithm="margin", block_length=16)
    drawn = sampler_for(OWN, EvaluationConfig(temperature=0.4), "llada", 64)
    assert drawn == dataclasses.replace(OWN, temperature=0.4)
    several = sampler_for(OWN, EvaluationConfig(temperature=0.4, samples=3), "llada", 64)
    assert several == dataclasses.replace(drawn, trace_entropy=True)


@pytest.mark.parametrize("length", [128, 256, 512])
@pytest.mark.parametrize("tokens", [1, 2])
def test_published_decoding(length, tokens):
    evaluation = EvaluationConfig(protocol="published", tokens_per_step=tokens)
    found = sampler_for(OWN, evaluation, "llada", length)
    assert (found.algorithm, found.steps, found.block_length, found.temperature) == (
        "low_confidence",
        length // tokens,
        BLOCK,
        0.0,
    )
    assert not found.stop_at_eos
    found.validate(length)
    assert found.schedule_of(length) == [tokens] * (BLOCK // tokens)
    dream = sampler_for(OWN, evaluation, "dream", length)
    assert (dream.algorithm, dream.steps, dream.temperature, dream.top_p) == ("entropy", length // tokens, 0.2, 0.95)
    dream.validate(length)
    dream.validate_model(ModelConfig(family="dream", logits_shift=True))


def test_published_surroundings():
    assert model_for(ModelConfig(), PUBLISHED).attend_to_padding
    assert not model_for(ModelConfig(), EvaluationConfig()).attend_to_padding
    dream = ModelConfig(family="dream", logits_shift=True)
    assert model_for(dream, PUBLISHED) == dream
    assert task_for(GSM8K, PUBLISHED) == dataclasses.replace(GSM8K, prompt="published_evaluation")
    assert task_for(GSM8K, EvaluationConfig()) == GSM8K
    assert prefill_for(PUBLISHED) == "<reasoning>"
    assert prefill_for(EvaluationConfig()) == ""


def test_accuracy_is_what_the_protocol_counts():
    figures = {"accuracy": 0.4, "exact": 0.3, "published": {"accuracy": 0.6}, "strict": {"accuracy": 0.5}}
    assert counted(EvaluationConfig(), "exact", figures) == figures
    assert counted(PUBLISHED, "exact", figures) == figures | {"accuracy": 0.6}
    # Where the task's own grader counts by the published rule, the strict verdicts take its place.
    assert counted(EvaluationConfig(), "published", figures) == figures | {"accuracy": 0.5, "exact": 0.5}
    bare = {"accuracy": 0.4, "exact": 0.3}
    assert counted(PUBLISHED, "exact", bare) == counted(EvaluationConfig(), "published", bare) == bare
