"""Small tokenizers whose tokens are byte strings, and the byte table of any tokenizer."""

import dataclasses
import functools

import numpy as np

from dmpo_jax.errors import UserError
from dmpo_jax.model.families import SpecialIds
from dmpo_jax.model.pieces import table

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
    def ids(self) -> SpecialIds:
        """The special ids that a checkpoint records."""
        return SpecialIds(mask=self.mask_id, eos=self.eos_id, pad=self.pad_id)

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
    def end_ids(self) -> tuple[int, ...]:
        """All tokens that end an answer."""
        return (self.eos_id,)

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

    def encode_prompt(self, text: str, begun: str = "") -> list[int]:
        """Token ids of a prompt: the text itself, these tokenizers know no conversations; `begun` begins the answer."""
        return self.encode(text + begun)

    def decode(self, ids) -> str:
        """Text up to the first end-of-sequence token; other special tokens are shown by name."""
        out = bytearray()
        for token in np.asarray(ids).tolist():
            if token == self.eos_id:
                break
            if token < self.vocab_size:  # a model may have more rows than there are tokens; they say nothing
                out += self.pieces[token] if token < len(self.pieces) else self._special(token).encode()
        return out.decode("utf-8", errors="replace")

    def _special(self, token: int) -> str:
        return SPECIAL[token - len(self.pieces)]

    @functools.cached_property
    def _index(self) -> tuple[dict[bytes, int], int]:
        return {p: i for i, p in enumerate(self.pieces)}, max(map(len, self.pieces))

    def byte_table(self) -> tuple[np.ndarray, np.ndarray]:
        """`uint8[V, W]` bytes of every token, zero-padded, and `int32[V]` their lengths: what device graders read."""
        rows = [*self.pieces, *(self._special(len(self.pieces) + i).encode() for i in range(len(SPECIAL)))]
        return table(rows, len(rows))


def make_tokenizer(kind: str) -> Tokenizer:
    """`character`: digits, arithmetic and the answer tags, one token each; `byte`: every byte is a token."""
    if kind == "character":
        pieces = (*(p.encode() for p in ANSWER_PIECES), *(c.encode() for c in CHARACTERS))
        return Tokenizer(kind, pieces)
    if kind == "byte":
        return Tokenizer(kind, tuple(bytes([i]) for i in range(256)))
    raise UserError(f'tokenizer.kind = "{kind}": expected "character", "byte" or "pretrained" (with model.pretrained)')
