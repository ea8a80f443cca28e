"""The safetensors format: one tensor at a time in, one tensor at a time out.

A file is 8 bytes of header length, a JSON header of names, dtypes, shapes and offsets, and the tensors' bytes. The
package of the same name reads no bfloat16 into NumPy, maps whole files and writes only from a dict that holds every tensor;
these functions hold one tensor.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from dmpo_jax.errors import UserError
from dmpo_jax.inputs import regular_size

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes


class Entry(NamedTuple):
    """Where a tensor lies: its file, dtype, shape and the position of its first byte."""

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def read(self) -> np.ndarray:
        """The tensor, in memory of its own."""
        count = math.prod(self.shape)
        values = np.fromfile(self.path, self.dtype, count, offset=self.start)
        if values.size != count:
            raise UserError(f"{self.path}: ends before its last tensor does; fetch the file again")
        return values.reshape(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """All tensors of a file by name. Raises UserError where the file is not what the format asks for."""

    def wrong(what: str) -> UserError:
        return UserError(f"{path}: not a valid safetensors file ({what}); fetch or write it again")

    try:
        size = regular_size(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise wrong("header longer than the file")
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise wrong("header is not JSON") from None
    if not isinstance(header, dict):
        raise wrong("header is not an object")
    header.pop("__metadata__", None)
    entries, places = {}, []
    for name, value in header.items():
        try:
            kind, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            raise wrong(f"bad entry of {name!r}") from None
        if kind not in DTYPES:
            raise UserError(f"{path}: {name} has dtype {kind!r}: expected one of {', '.join(DTYPES)}")
        if not whole or end - begin != math.prod(shape) * DTYPES[kind].itemsize:
            raise wrong(f"bad offsets of {name!r}")
        entries[name] = Entry(path, DTYPES[kind], shape, 8 + length + begin)
        places.append((begin, end))
    at = 0
    for begin, end in sorted(places):
        if begin != at:
            raise wrong("tensors overlap or leave holes")
        at = end
    if at != size - 8 - length:
        raise wrong(f"{at} bytes of tensors, but {size - 8 - length} in the file")
    return entries


def write_file(path: Path, shapes: dict[str, tuple[np.dtype, tuple[int, ...]]], tensors: Iterable[np.ndarray]) -> None:
    """Writes tensors in the order of `shapes` (name -> dtype and shape), each dropped before the next is asked for."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, (dtype, shape)), tensor in zip(shapes.items(), tensors, strict=True):
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(f"{name}: {tensor.dtype} {tensor.shape} where {dtype} {shape} was announced")
            np.ascontiguousarray(tensor).tofile(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
