"""The bytes that each token stands for, from how a vocabulary spells its tokens; what device grading reads."""

import re
from collections.abc import Sequence

import numpy as np

from dmpo_jax.errors import UserError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: itself where printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


_ALPHABET = _byte_level_alphabet()


def piece(token: str, spelling: str) -> bytes:
    """Bytes of an ordinary token spelled in `byte-level` or `metaspace` fashion.

    A metaspace vocabulary writes a space as U+2581 and a lone byte as `<0xAB>`.
    """
    if spelling == "byte-level":
        try:
            return bytes(_ALPHABET[c] for c in token)
        except KeyError:
            raise UserError(f"tokenizer.json: token {token!r} is not spelled in byte-level fashion") from None
    lone = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(lone[1], 16)]) if lone else token.replace("\u2581", " ").encode()


def table(pieces: Sequence[bytes], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(pieces `uint8[rows, W]`, their lengths `int32[rows]`); ids without bytes have length 0."""
    width = max(max(map(len, pieces), default=0), 1)
    out = np.zeros((rows, width), np.uint8)
    for row, data in zip(out, pieces, strict=False):
        row[: len(data)] = np.frombuffer(data, np.uint8)
    lengths = np.zeros(rows, np.int32)
    lengths[: len(pieces)] = [len(data) for data in pieces]
    return out, lengths
