"""Data files read line by line with bounds on their size; each error names the file and the line.

A name `hf:owner/dataset/path/in/it` stands for a file of a dataset on the Hugging Face Hub, which is fetched once. The rows of
a parquet file come as JSON lines.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from dmpo_jax.errors import UserError
from dmpo_jax.inputs import regular_size

MAX_FILE_BYTES = 256 * 2**20
MAX_LINE_BYTES = 64 * 2**10
HUB = "hf:"


def exists(path: str) -> bool:
    """Whether a data file is there, or may be fetched."""
    return path.startswith(HUB) or os.path.exists(path)


def read_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of each line of a UTF-8 file that is not blank.

    Raises `UserError` where the file cannot be read, is not a regular file, exceeds `MAX_FILE_BYTES`, has a
    line over `MAX_LINE_BYTES`, or is not UTF-8.
    """
    if path.startswith(HUB):
        path = _from_hub(path)
    if path.endswith(".parquet"):
        yield from _parquet_rows(path)
        return
    try:
        regular_size(path, MAX_FILE_BYTES)
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise wrong(path, number, line, f"a line of at most {MAX_LINE_BYTES} bytes", "check its format")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    raise wrong(path, number, line, "UTF-8 text", "save the file as UTF-8") from None
                if text:
                    yield number, text
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path!r}: cannot be read ({reason}); name an existing data file") from None


def _from_hub(name: str) -> str:
    """The local copy of a file of a Hub dataset."""
    owner, _, rest = name.removeprefix(HUB).partition("/")
    dataset, _, file = rest.partition("/")
    if not (owner and dataset and file):
        raise UserError(f"{name!r}: expected {HUB}owner/dataset/path/of/file; name one file of a dataset on the Hub")
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(f"{owner}/{dataset}", file, repo_type="dataset")
    except Exception as error:  # of many libraries: no network, no such dataset, no rights, ...
        why = " ".join(str(error).split())[:160]
        remedy = "check the name and the network, or give a local file"
        raise UserError(f"{name}: cannot be fetched ({type(error).__name__}: {why}); {remedy}") from None


def _parquet_rows(path: str) -> Iterator[tuple[int, str]]:
    regular_size(path, MAX_FILE_BYTES)
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(
            f"{path}: pyarrow is not installed; run pip install 'dmpo_jax[parquet]', or convert the file to JSON lines"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(Path(path)) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    text = json.dumps(row, default=str)
                    if len(text) > MAX_LINE_BYTES:
                        raise wrong(path, number, text, f"a row of at most {MAX_LINE_BYTES} bytes", "check its format")
                    yield number, text
    except (ArrowException, OSError) as error:
        why = " ".join(str(error).split())[:160]
        raise UserError(f"{path}: cannot be read as parquet ({why}); name a parquet file, or JSON lines") from None


def wrong(path: str, line: int, found: object, expected: str, remedy: str) -> UserError:
    """The error for one line: where, what was found (cut short), what was expected, and the remedy."""
    shown = repr(found[:80] if isinstance(found, str | bytes) else found)
    shown = shown if len(shown) <= 100 else shown[:100] + "..."
    return UserError(f"{path}, line {line}: found {shown}, expected {expected}; {remedy}")
