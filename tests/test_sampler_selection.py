"""Schedules, commit rules and proposals against slow loops, and against the official selection code's results."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.proposal import KeyedNoise, entropy_of, filtered, forbid, log_prob_of, margin_of, propose
from dmpo_jax.diffusion.selection import (
    COMMIT_RULES,
    SCHEDULES,
    Candidates,
    Revision,
    dream_schedule,
    dream_shares,
    rounded_schedule,
    top_ranked,
    transfer_schedule,
    wide_in_narrow_out,
)

FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "fixtures"


def test_schedules():
    # Spot values: published loops, run once (LLaDA, dllm, Dream).
    assert transfer_schedule(10, 4) == [3, 3, 2, 2]
    assert rounded_schedule(10, 4) == [2, 3, 2, 3]
    assert rounded_schedule(32, 6) == [5, 5, 6, 5, 6, 5]
    assert dream_schedule(64, 16) == [3, *[4] * 14, 5]
    assert dream_schedule(128, 64) == [1, *[2] * 62, 3]
    long = dream_schedule(512, 512)
    assert long.count(0) == 1 and long[-1] == 2
    for rule in SCHEDULES.values():
        for masked in range(1, 65):
            for steps in range(1, masked + 1):
                counts = rule(masked, steps)
                assert sum(counts) == masked and min(counts) >= 0 and len(counts) <= steps
    shares = dream_shares(4)
    levels = np.linspace(1, 1e-3, 5)
    np.testing.assert_allclose(shares[:3], 1 - levels[1:4] / levels[:3], atol=1e-6)
    assert shares[3] == 1


def slow_rule(name, score, probability, entropy, allowed, count, level):
    """One row, position by position."""
    order = sorted((i for i in range(len(score)) if allowed[i]), key=lambda i: (-score[i], i))
    if not order:
        return set()
    if name == "schedule":
        return set(order[:count])
    if name == "threshold":
        return {order[0]} | {i for i in order if probability[i] >= level}
    if name == "dynamic":
        sure = {i for i in order if probability[i] > level}
        return sure if len(sure) >= count else set(order[:count])
    if name == "run":
        order = sorted(order)
    taken, total, largest = [], 0.0, 0.0
    for k, i in enumerate(order):
        p, h = probability[i], entropy[i]
        total, largest = total + (h if "entropy" in name else p), max(largest, h)
        good = {
            "factor": p >= 1 - level / (k + 2),
            "published_factor": p >= 1 - level / (k + 2) or k == len(order) - 1,
            "frechet": total - (k + 1) + p > level,
            "entropy_bound": total - largest <= level,
            "entropy_sum": total < level,
            "run": p >= level,
        }[name]
        if k and not good:
            break
        taken.append(i)
    return set(taken)


@pytest.mark.parametrize("name", COMMIT_RULES)
def test_commit_rules_equal_slow_loops(name):
    rng = np.random.default_rng(0)
    rows, width = 3000, 8
    # Sixty-fourths are exact, so sums are too; few values make many ties. Some rows are all sure or all unsure.
    probability = rng.integers(0, 65, (rows, width)) / 64
    probability[:300], probability[300:600] = 63 / 64, 1 / 64
    entropy = rng.integers(0, 129, (rows, width)) / 64
    score = -entropy if "entropy" in name else probability
    allowed = rng.random((rows, width)) < rng.choice([0, 0.2, 0.6, 1], (rows, 1))
    for level in (0.25, 0.5, 1.5):
        count = rng.integers(1, 5, (rows, 1))
        found = COMMIT_RULES[name](
            Candidates(*(jnp.asarray(x, jnp.float32) for x in (score, probability, entropy)), allowed, count), level
        )
        for row in range(rows):
            wanted = slow_rule(
                name, score[row], probability[row], entropy[row], allowed[row], int(count[row, 0]), level
            )
            assert set(np.where(found[row])[0]) == wanted


def test_positions_scored_minus_infinity_come_before_those_not_allowed():
    score = jnp.array([[-jnp.inf, 1.0, -jnp.inf]])
    assert top_ranked(score, jnp.array([[True, False, False]]), 1).tolist() == [[True, False, False]]


@pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures is absent")
def test_official_selections():
    f = np.load(FIXTURES / "transfer.npz")
    logits, mask = jnp.asarray(f["logits"]), jnp.asarray(f["mask"])
    for steps in (1, 3, 4, 7, 24):
        wanted = [transfer_schedule(int(m), steps) for m in mask.sum(1)]
        assert f[f"num_transfer/{steps}"].tolist() == wanted
    token = propose(logits, None, 0.0)
    log_prob = log_prob_of(logits, token)
    for key in f:
        kind, _, rest = key.partition("/")
        level, _, what = rest.partition("/")
        if what == "x0":
            assert np.array_equal(np.where(mask, token, f["x"]), f[key])
        if what != "transfer":
            continue
        name = {"topk": "schedule", "factor": "published_factor"}.get(kind, kind)
        found = COMMIT_RULES[name](Candidates(log_prob, jnp.exp(log_prob), None, mask, int(float(level))), float(level))
        assert np.array_equal(found, f[key]), key


def test_proposals_agree_in_every_form():
    """Ratio form, guarded log form and logits + temperature x noise choose alike for the same uniforms."""
    rng = np.random.default_rng(0)
    for temperature in (0.2, 0.7, 1.0):
        logits = rng.uniform(-20, 60, (500, 1, 200))
        u = rng.random(logits.shape)
        ratio = (np.exp(logits - 60) / (-np.log(u)) ** temperature).argmax(-1)
        guarded = (logits - temperature * np.log(-np.log(u + 1e-10) + 1e-10)).argmax(-1)
        noise = jnp.asarray(-np.log(-np.log(u)), jnp.float32)
        found = np.asarray(propose(jnp.asarray(logits, jnp.float32), noise, temperature))
        assert np.array_equal(ratio, guarded) and (found == ratio).mean() >= 0.998


def test_many_draws_follow_the_law_to_its_tail():
    logits = np.concatenate([np.linspace(0, -4, 46), np.full(4, np.log(1e-5) + 3)])
    share = np.exp(logits) / np.exp(logits).sum()
    draws = 300_000

    def batch(key):
        noise = jax.random.gumbel(key, (100_000, 1, 50), jnp.float32, mode="high")
        return propose(jnp.asarray(logits, jnp.float32), noise, 1.0)[:, 0]

    found = jax.lax.map(batch, jax.random.split(jax.random.key(1), draws // 100_000))
    count = np.bincount(np.asarray(found).ravel(), minlength=50).astype(float)
    tail = slice(46, 50)
    count, wanted = np.append(count[:46], count[tail].sum()), draws * np.append(share[:46], share[tail].sum())
    statistic = ((count - wanted) ** 2 / wanted).sum()
    assert statistic < 46 + 2.33 * math.sqrt(2 * 46)  # 1 % of chi-square with 46 degrees of freedom


def test_filters():
    probability = np.array([0.4, 0.05, 0.3, 0.25])
    logits = jnp.log(jnp.asarray(probability, jnp.float32))
    kept = lambda **options: np.where(np.asarray(filtered(logits, **options)) > -np.inf)[0].tolist()  # noqa: E731
    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [0, 2] and kept(top_k=9) == [0, 1, 2, 3]
    assert kept(top_p=0.1) == [0] and kept(top_p=0.69) == [0, 2] and kept(top_p=0.8) == [0, 2, 3]
    assert kept(top_k=2, top_p=0.5) == [0]  # of the two left, 0.4 / 0.7 is enough
    assert kept(top_k=1, top_p=0.99) == [0]


def test_the_nucleus_is_what_sorting_finds():
    """Random rows with ties, a zero of either sign and forbidden tokens, against a sort in fp64."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (200, 97)).round(1).astype(np.float32)
    logits[:, :5] = [0.0, -0.0, -np.inf, -np.inf, 1e-30]
    for top_p in (0.013, 0.5, 0.9, 0.999):
        kept = np.asarray(filtered(jnp.asarray(logits), top_p=top_p)) > -np.inf
        for row, inside in zip(logits.astype(np.float64), kept, strict=True):
            share = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            above = np.array([share[row > x].sum() for x in row])
            clear = abs(above - top_p) > 1e-6
            assert (inside == (above <= top_p) & (row > -np.inf))[clear].all() and clear.mean() > 0.9


def test_scores():
    logits = forbid(jnp.log(jnp.array([[0.5, 0.25, 0.25, 9.0]])), 3)
    assert entropy_of(logits)[0] == pytest.approx(1.5 * math.log(2), abs=1e-6)
    assert margin_of(logits)[0] == pytest.approx(0.25, abs=1e-6)
    assert log_prob_of(logits, jnp.array([1]))[0] == pytest.approx(math.log(0.25), abs=1e-6)


def test_positions_drawn_by_noisy_scores_are_drawn_without_replacement():
    """Two of three positions, softmax(score) = 1/2, 1/3, 1/6: pairs as by drawing one after the other."""
    draws, p = 100_000, np.array([1 / 2, 1 / 3, 1 / 6])
    uniform = KeyedNoise(row_keys(jax.random.key(0), jnp.arange(draws))).uniform(jnp.zeros(draws, jnp.int32), 3)
    score = jnp.log(jnp.asarray(p, jnp.float32)) - jnp.log(-jnp.log(uniform))
    found = np.asarray(top_ranked(score, jnp.ones((draws, 3), bool), 2))
    for left in range(3):
        i, j = (k for k in range(3) if k != left)
        wanted = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        assert (~found[:, left]).mean() == pytest.approx(wanted, abs=4 * math.sqrt(0.25 / draws))


def test_a_wide_block_ends_within_as_many_iterations_as_it_has_positions():
    """WINO on random confidences, 1000 rows; and it does revoke."""
    width, rows = 16, 1000
    rng = np.random.default_rng(0)
    masked = np.ones((rows, width), bool)
    memory = Revision(jnp.zeros((rows, width), bool), jnp.full((rows,), 30))
    revoked = 0
    rule = jax.jit(lambda p, check, masked, memory: wide_in_narrow_out(
        Candidates(p, p, None, masked, None), check, memory, 0.6, 0.9
    ))  # fmt: skip
    for _ in range(width):
        assert masked.any()
        commit, back, memory = rule(*rng.random((2, rows, width), np.float32), masked, memory)
        assert not (commit & ~masked).any() and not (back & masked).any()
        assert (commit.any(1) == masked.any(1)).all()
        masked = (masked & ~commit) | back
        revoked += int(back.sum())
        if not masked.any():
            break
    assert not masked.any() and revoked > rows
