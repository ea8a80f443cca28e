"""Tokens to bytes, answer spans and wrappers: the device side against plain Python."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dmpo_jax.tasks import TASKS, bytes, text


def pack(texts, width):
    """Byte strings -> uint8[B, width] and lengths int32[B]; the filling is not zero on purpose."""
    stream = np.full((len(texts), width), ord("7"), np.uint8)
    for row, raw in zip(stream, texts, strict=True):
        row[: len(raw)] = np.frombuffer(raw, np.uint8)
    return stream, np.array([len(raw) for raw in texts], np.int32)


def grade_on_device(task, texts, features, width):
    """Grade byte strings by the device grader as a list of dictionaries of floats."""
    stacked = {key: np.stack([item[key] for item in features]) for key in features[0]}
    graded = jax.jit(task.grade_bytes)(*pack(texts, width), stacked)
    return [{key: float(column[row]) for key, column in graded.items()} for row in range(len(texts))]


def spans(texts, width=160):
    span, size = jax.jit(bytes.answer_span)(*pack(texts, width))
    return [row[:n].tobytes() if n <= text.SPAN_BYTES else int(n) for row, n in zip(np.array(span), size, strict=True)]


def test_to_bytes_matches_a_loop_over_tokens():
    rng = np.random.default_rng(0)
    vocabulary, width, rows, count = 50, 5, 20, 12
    table_length = rng.integers(0, width + 1, vocabulary).astype(np.int32)
    table = rng.integers(0, 256, (vocabulary, width)).astype(np.uint8)  # bytes past a piece's length are junk
    tokens = rng.integers(0, vocabulary, (rows, count)).astype(np.int32)
    tokens[0] = 7  # begins with an end token: nothing
    tokens[1] = np.where(tokens[1] == 7, 8, np.where(tokens[1] == 9, 8, tokens[1]))  # no end token
    table_length[8] = 0
    tokens[2, :6] = 8  # leading tokens without bytes
    stream, length = jax.jit(bytes.to_bytes, static_argnums=3)(tokens, table, table_length, (7, 9))
    assert stream.shape == (rows, count * width)
    assert stream.dtype == jnp.uint8
    for row in range(rows):
        expected = b""
        for token in tokens[row]:
            if token in (7, 9):
                break
            expected += table[token, : table_length[token]].tobytes()
        assert int(length[row]) == len(expected)
        assert np.array(stream[row]).tobytes() == expected.ljust(count * width, b"\0")


def test_to_bytes_without_end_tokens_and_full_pieces():
    table = np.arange(8, dtype=np.uint8).reshape(4, 2)
    stream, length = bytes.to_bytes(jnp.array([[3, 0, 1]]), jnp.array(table), jnp.full(4, 2, jnp.int32), ())
    assert np.array(stream).tolist() == [[6, 7, 0, 1, 2, 3]]
    assert length.tolist() == [6]


SPANS = [
    (b"<answer>3+4</answer>", b"3+4"),
    (b"x<answer>1</answer>y<answer>2</answer>z", b"2"),
    (b"<answer>1<answer>2</answer>", b"2"),
    (b"<answer>1</answer>2</answer>", b"1"),
    (b"<answer>1</answer> <answer>2", b"1"),
    (b"</answer><answer>1", b""),
    (b"<answer>1", b""),
    (b"1</answer>", b""),
    (b"", b""),
    (b"<Answer>1</Answer>", b""),
    (b"<answer >1</answer>", b""),
    (b"<answer></answer>", b""),
    (b"<answer>1</answer><|eot_id|><answer>2</answer>", b"1"),
    (b"<answer>1<|eot_id|></answer>", b""),
    (b"<answer>1</answer><|endoftext|><|endoftext|>", b"1"),
    (b"<answer>1</answer><|im_end|><answer>2</answer>", b"1"),
    (b"<answer>1</answer><|end_of_text|><answer>2</answer>", b"1"),
    (b"<answer>1</answer><|eot_id <answer>2</answer>", b"2"),
    (b"<answer>1</ans<|eot_id|>wer>", b""),
    (b"<answer>a\0b</answer>", b"a\0b"),
]


@pytest.mark.parametrize(("raw", "expected"), SPANS)
def test_answer_of_text(raw, expected):
    assert text.answer_of(raw.decode()) == expected


def test_answer_span_agrees_on_device():
    assert spans([raw for raw, _ in SPANS]) == [expected for _, expected in SPANS]


def test_bytes_past_the_length_are_not_read():
    stream, length = pack([b"<answer>1</answer>"] * 2, 40)
    stream[1, 18:36] = np.frombuffer(b"<answer>2</answer>", np.uint8)
    span, size = bytes.answer_span(jnp.array(stream), jnp.array(length))
    assert size.tolist() == [1, 1]
    assert np.array(span[:, 0]).tobytes() == b"11"


def test_answers_longer_than_the_span_are_not_graded():
    at_limit = b"<answer>" + b"1" * text.SPAN_BYTES + b"</answer>"
    beyond = b"<answer>" + b"1" * (text.SPAN_BYTES + 1) + b"</answer>"
    assert text.answer_of(at_limit.decode()) == b"1" * text.SPAN_BYTES
    assert text.answer_of(beyond.decode()) == b""
    assert spans([at_limit, beyond], 300) == [b"1" * text.SPAN_BYTES, text.SPAN_BYTES + 1]
    _, inside = bytes.unwrap(*bytes.answer_span(*map(jnp.array, pack([at_limit, beyond], 300))))
    assert inside.sum(axis=1).tolist() == [text.SPAN_BYTES, 0]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\n 3+4 \t", b"3+4"),
        (rb"\boxed{3+4}", b"3+4"),
        (b" \\boxed{ 3+4\n} ", b"3+4"),
        (rb"$3+4$", b"3+4"),
        (rb"$$ 3+4 $$", b"3+4"),
        (rb"$\boxed{3+4}$", b"3+4"),
        (rb"\boxed{$3+4$}", b"3+4"),
        (rb"\(3+4\)", b"3+4"),
        (rb"\[ \boxed{3+4} \]", b"3+4"),
        (rb"\boxed{\boxed{3+4}}", rb"\boxed{3+4}"),
        (rb"\boxed{3+4", rb"\boxed{3+4"),
        (b"$", b"$"),
        (b"$$", b""),
        (rb"\boxed{}", b""),
        (b" ", b""),
        (b"", b""),
    ],
)
def test_unwrap(raw, expected):
    assert text.unwrap(raw) == expected
    stream, length = pack([raw], text.SPAN_BYTES)
    span, inside = bytes.unwrap(jnp.array(stream), jnp.array(length))
    assert np.array(span)[np.array(inside)].tobytes() == expected
    assert not np.array(span)[~np.array(inside)].any()


def test_matches_finds_every_place():
    raw = b"abababa<|"
    found = bytes.matches(jnp.array([list(raw)], jnp.uint8), b"aba")[0]
    assert np.flatnonzero(found).tolist() == [m.start() for m in re.finditer(b"(?=aba)", raw)]
    assert not bytes.matches(jnp.array([list(b"ab")], jnp.uint8), b"abc").any()


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.grade_bytes])
def test_graders_run_inside_shard_map(name):
    """Each device grades its rows; the result equals that of one program over all rows."""
    task = TASKS[name]
    truth = {
        "sudoku": {"puzzle": "1030300200430001", "solution": "1234341221434321"},
        "countdown": {"numbers": [3, 4], "target": 7},
        "gsm8k": {"answer": "1234341221434321"},
    }[name]
    right = {"sudoku": b"1234341221434321", "countdown": b"3+4", "gsm8k": b"1234341221434321"}[name]
    devices = jax.devices()[:8]
    texts = [b"<answer>" + right[: 16 - n % 4] + b"</answer>" for n in range(4 * len(devices))]
    stream, length = pack(texts, 64)
    features = {key: np.stack([value] * len(texts)) for key, value in task.features(truth).items()}
    rows = PartitionSpec("data")
    mesh = Mesh(np.array(devices), ("data",))
    sharded = jax.jit(jax.shard_map(task.grade_bytes, mesh=mesh, in_specs=rows, out_specs=rows))
    expected = jax.jit(task.grade_bytes)(stream, length, features)
    got = sharded(stream, length, features)
    assert set(got) == set(task.components)
    for key in task.components:
        assert got[key].dtype == jnp.float32
        np.testing.assert_array_equal(got[key], expected[key])
    assert float(jnp.max(got["reward"])) == 1.0
