"""Small tokenizers whose tokens are byte strings, and the byte table of any tokenizer."""

import dataclasses
import functools

import numpy as np

from dmpo_jax.errors import UserError

SPECIAL = ("<|pad|>", "<|mask|>", "<|endoftext|>")
ANSWER_PIECES = ("<answer>", "</answer>")
CHARACTERS = "0123456789+-*/()=,:. \n"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Greedy longest-match tokenizer over byte pieces. Special tokens come last and have no bytes of their own.

    `pieces[i]` are the bytes of token i. Ids: ordinary pieces, then pad, mask, end of sequence.
    """

    kind: str
    pieces: tuple[bytes, ...]

    @property
    def pad_id(self) -> int:
        """Fills a prompt's row after the prompt; never attended to."""
        return len(self.pieces)

    @property
    def mask_id(self) -> int:
        """The token that stands for an unknown one."""
        return len(self.pieces) + 1

    @property
    def eos_id(self) -> int:
        """Ends a completion."""
        return len(self.pieces) + 2

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return len(self.pieces) + len(SPECIAL)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises UserError naming the first character that no piece covers."""
        data, ids, at = text.encode("utf-8"), [], 0
        index, longest = self._index
        while at < len(data):
            for size in range(min(longest, len(data) - at), 0, -1):
                token = index.get(data[at : at + size])
                if token is not None:
                    ids.append(token)
                    at += size
                    break
            else:
                raise UserError(
                    f"tokenizer {self.kind}: no token for {data[at : at + 1]!r} in {text[:40]!r}; "
                    'use tokenizer.kind = "byte", which covers every text'
                )
        return ids

    def decode(self, ids) -> str:
        """Text up to the first end-of-sequence token; other special tokens are shown by name."""
        out = bytearray()
        for token in np.asarray(ids).tolist():
            if token == self.eos_id:
                break
            out += self.pieces[token] if token < len(self.pieces) else self._special(token).encode()
        return out.decode("utf-8", errors="replace")

    def _special(self, token: int) -> str:
        return SPECIAL[token - len(self.pieces)] if token < self.vocab_size else f"<|{token}|>"

    @functools.cached_property
    def _index(self) -> tuple[dict[bytes, int], int]:
        return {p: i for i, p in enumerate(self.pieces)}, max(map(len, self.pieces))

    def byte_table(self) -> tuple[np.ndarray, np.ndarray]:
        """`uint8[V, W]` bytes of every token, zero-padded, and `int32[V]` their lengths: what device graders read."""
        rows = [*self.pieces, *(self._special(len(self.pieces) + i).encode() for i in range(len(SPECIAL)))]
        table = np.zeros((len(rows), max(map(len, rows))), np.uint8)
        for i, row in enumerate(rows):
            table[i, : len(row)] = np.frombuffer(row, np.uint8)
        return table, np.array([len(row) for row in rows], np.int32)


def make_tokenizer(kind: str) -> Tokenizer:
    """`character`: digits, arithmetic and the answer tags, one token each; `byte`: every byte is a token."""
    if kind == "character":
        pieces = (*(p.encode() for p in ANSWER_PIECES), *(c.encode() for c in CHARACTERS))
        return Tokenizer(kind, pieces)
    if kind == "byte":
        return Tokenizer(kind, tuple(bytes([i]) for i in range(256)))
    raise UserError(f'tokenizer.kind = "{kind}": expected "character" or "byte"')
