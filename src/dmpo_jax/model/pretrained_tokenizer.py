"""The tokenizer of a checkpoint folder, behind the same small interface as the embedded ones."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from dmpo_jax.errors import UserError
from dmpo_jax.inputs import read_json
from dmpo_jax.model import chat, pieces
from dmpo_jax.model.families import SpecialIds, read_config, read_family, special_ids

# How Qwen2 vocabularies, which are also published without a tokenizer.json, cut a text before merging.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True, eq=False)
class PretrainedTokenizer:
    """A `tokenizers` tokenizer with the special ids of config.json. `vocab_size` counts the model's rows, used or not."""

    kind: str
    template: str
    vocab_size: int
    ids: SpecialIds
    end_ids: tuple[int, ...]
    backend: tokenizers.Tokenizer

    @property
    def pad_id(self) -> int:
        """Fills a prompt's row after the prompt."""
        return self.ids.pad

    @property
    def mask_id(self) -> int:
        """The token that stands for an unknown one."""
        return self.ids.mask

    @property
    def eos_id(self) -> int:
        """Ends a completion."""
        return self.ids.eos

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it stands; nothing is added. Raises UserError where it spells the mask token."""
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if self.mask_id in ids:
            raise UserError(f"the text {text[:40]!r} spells the mask token; only decoding may place it")
        return ids

    def encode_prompt(self, text: str, begun: str = "") -> list[int]:
        """Token ids of a user's question in the chat template, up to where the answer begins, and of how it is `begun`."""
        return self.encode(chat.render(self.template, [{"role": "user", "content": text}]) + begun)

    def decode(self, ids) -> str:
        """Text up to the first token that ends an answer; other special tokens are shown by name."""
        out = bytearray()
        for token in np.asarray(ids).tolist():
            if token in self.end_ids:
                break
            out += self._pieces[token] if token < len(self._pieces) else b""
        return out.decode("utf-8", errors="replace")

    def byte_table(self) -> tuple[np.ndarray, np.ndarray]:
        """`uint8[V, W]` bytes of every token, zero-padded, and `int32[V]` their lengths: what device graders read."""
        return pieces.table(self._pieces, self.vocab_size)

    @functools.cached_property
    def _pieces(self) -> list[bytes]:
        added = {token["id"]: token["content"] for token in self._content["added_tokens"]}
        spelling, out = self._spelling, [b""] * self.backend.get_vocab_size(with_added_tokens=True)
        for token, number in self.backend.get_vocab(with_added_tokens=True).items():
            out[number] = added[number].encode() if number in added else pieces.piece(token, spelling)
        return out

    @functools.cached_property
    def _content(self) -> dict[str, Any]:
        return json.loads(self.backend.to_str())

    @property
    def _spelling(self) -> str:
        parts = json.dumps([self._content.get("pre_tokenizer"), self._content.get("decoder")])
        if '"ByteLevel"' in parts:
            return "byte-level"
        if '"Metaspace"' in parts or self._content["model"].get("byte_fallback"):
            return "metaspace"
        raise UserError("tokenizer.json: neither byte-level nor metaspace; its tokens cannot be read as bytes")


def load_tokenizer(folder: Path, template: str = "") -> PretrainedTokenizer:
    """The tokenizer of a checkpoint folder. `template` "" is the family's chat template, "none" the text as it stands.

    Raises UserError where a special token of config.json or of the template is not one in the vocabulary.
    """
    content = read_json(folder / "config.json")
    source = str(folder / "config.json")
    family, ids = read_family(content, source), special_ids(content, source)
    rows = read_config(content, source).vocab_size
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    backend = _backend(folder, settings)
    size = backend.get_vocab_size(with_added_tokens=True)
    if size > rows:
        raise UserError(
            f"{folder}: the tokenizer has {size} tokens, but the model {rows} rows; they do not belong together"
        )
    _check_special(folder, backend, ids, settings)
    template = template or family.template
    chat.render(template, [])  # refuses an unknown name
    for token in chat.special_tokens(template):
        if len(backend.encode(token, add_special_tokens=False).ids) != 1:
            raise UserError(
                f'{folder}: template "{template}" needs the token {token}, which the tokenizer lacks; '
                'set tokenizer.template = "none" or another one'
            )
    stop = [backend.token_to_id(token) for token in family.stop_tokens]
    end_ids = tuple(dict.fromkeys([ids.eos, *(i for i in stop if i is not None)]))
    return PretrainedTokenizer("pretrained", template, rows, ids, end_ids, backend)


def _backend(folder: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    path, vocab, merges = folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt"
    try:
        if path.exists():
            return tokenizers.Tokenizer.from_file(str(path))
        if vocab.exists() and merges.exists():
            return _from_merges(vocab, merges, settings)
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{folder}: the tokenizer's files are malformed ({error})") from None
    raise UserError(f"{folder}: no tokenizer.json, nor vocab.json with merges.txt; put the model's tokenizer there")


def _from_merges(vocab: Path, merges: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN_SPLIT), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    added = settings.get("added_tokens_decoder")
    if not isinstance(added, dict):
        raise UserError(
            f"{vocab.parent}/tokenizer_config.json: no added_tokens_decoder, so the special tokens are unknown"
        )
    for number, token in sorted(added.items(), key=lambda item: int(item[0])):
        flags = {key: bool(token.get(key)) for key in ("lstrip", "rstrip", "normalized", "single_word", "special")}
        backend.add_tokens([tokenizers.AddedToken(token["content"], **flags)])
        if backend.token_to_id(token["content"]) != int(number):
            raise UserError(
                f"{vocab.parent}: {token['content']} should be token {number}; the vocabulary is another one"
            )
    return backend


def _check_special(folder: Path, backend: tokenizers.Tokenizer, ids: SpecialIds, settings: dict[str, Any]) -> None:
    for name, number in dataclasses.asdict(ids).items():
        token = backend.id_to_token(number)
        if token is None:
            raise UserError(f"{folder}: config.json's {name}_token_id = {number} is no token of the tokenizer")
        said = settings.get(f"{name}_token")
        said = said.get("content") if isinstance(said, dict) else said
        if isinstance(said, str) and backend.token_to_id(said) != number:
            raise UserError(
                f"{folder}: config.json's {name}_token_id = {number} is {token!r}, but tokenizer_config.json's {name}_token "
                f"is {said!r} = {backend.token_to_id(said)}; they do not belong together"
            )
    if "mask" not in backend.id_to_token(ids.mask).lower():
        raise UserError(
            f"{folder}: config.json's mask_token_id = {ids.mask} is {backend.id_to_token(ids.mask)!r}, which is no mask token"
        )
