"""Data files from a hub and in parquet, and what is said where they cannot be had."""

import builtins
import json

import pyarrow
import pyarrow.parquet
import pytest

from dmpo_jax.errors import UserError
from dmpo_jax.tasks import files
from dmpo_jax.tasks.files import read_lines

ROWS = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "“2” + 2?\n", "answer": "#### 4"}]


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "test.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def test_rows_of_a_parquet_file_are_json_lines(parquet):
    found = list(read_lines(str(parquet)))
    assert [number for number, _ in found] == [1, 2]
    assert [json.loads(line) for _, line in found] == ROWS


def test_a_parquet_file_of_many_groups_is_read_in_order(tmp_path):
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(1000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=300)
    assert [json.loads(line) for _, line in read_lines(str(tmp_path / "x.parquet"))] == rows


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    (tmp_path / "x.parquet").write_text("question,answer\n")
    with pytest.raises(UserError, match=r"x\.parquet: cannot be read as parquet"):
        list(read_lines(str(tmp_path / "x.parquet")))


def test_a_row_without_bounds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    rows = [{"question": "?", "answer": "1"}, {"question": "x" * 200, "answer": "1"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"line 2: .*expected a row of at most 100 bytes"):
        list(read_lines(str(tmp_path / "x.parquet")))


def test_without_pyarrow_the_line_says_what_to_install(parquet, monkeypatch):
    load = builtins.__import__

    def refuse(name, *rest, **more):
        if name == "pyarrow":
            raise ImportError(name)
        return load(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pip install 'dmpo_jax\[parquet\]', or convert"):
        list(read_lines(str(parquet)))


def test_a_hub_name_is_fetched_once_and_read(tmp_path, monkeypatch):
    (tmp_path / "train.jsonl").write_text('{"question": "?"}\n')
    asked = []

    def fetch(*arguments, **more):
        asked.append((arguments, more))
        return str(tmp_path / "train.jsonl")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert list(read_lines("hf:openai/gsm8k/main/train.jsonl")) == [(1, '{"question": "?"}')]
    assert asked == [(("openai/gsm8k", "main/train.jsonl"), {"repo_type": "dataset"})]


def test_what_the_hub_does_not_give_ends_in_one_line(monkeypatch):
    def fetch(*_, **__):
        raise ConnectionError("no\nroute")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    with pytest.raises(
        UserError, match=r"^hf:a/b/c.jsonl: cannot be fetched \(ConnectionError: no route\); check the name"
    ):
        list(read_lines("hf:a/b/c.jsonl"))


@pytest.mark.parametrize("name", ["hf:", "hf:openai", "hf:openai/gsm8k", "hf:openai//train.jsonl"])
def test_names_that_lack_a_part_are_refused(name):
    with pytest.raises(UserError, match="expected hf:owner/dataset/path/of/file"):
        list(read_lines(name))
