"""Checkpoints' tokenizers: special ids that agree, chat templates to the letter, and the bytes of every token."""

import json
import shutil
from pathlib import Path

import hf_checkpoints as hf
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from dmpo_jax.errors import UserError
from dmpo_jax.model import chat
from dmpo_jax.model.pieces import piece, table
from dmpo_jax.model.pretrained_tokenizer import load_tokenizer
from dmpo_jax.model.tokenizer import make_tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenizers"
SPECIAL = ("<|endoftext|>", "<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mdm_mask|>")
USER = [{"role": "user", "content": " Hi there \n"}]


def byte_level(folder, change=None, config=None, specials=SPECIAL, settings=None):
    """A folder with a byte-level tokenizer of 256 bytes, one merge, and special tokens from id 257 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"Ġa": 256}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    backend.add_tokens([AddedToken("<think>", special=False)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    mask = backend.token_to_id(specials[-1])
    content = {**hf.LLADA, "vocab_size": 300, "embedding_size": 300, "mask_token_id": mask, "eos_token_id": 257,
               "pad_token_id": 257, **(config or {})}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_interface(tmp_path):
    tokenizer = load_tokenizer(byte_level(tmp_path))
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.mask_id) == (257, 257, 262)
    assert tokenizer.end_ids == (257, 261)  # <|endoftext|> and <|eot_id|>
    assert tokenizer.vocab_size == 300  # the model's rows, not all of them named
    ids = tokenizer.encode("b a 2é")
    assert tokenizer.decode(ids) == "b a 2é" and 256 in ids
    assert tokenizer.decode([*ids, 258, 263, 261, *ids]) == "b a 2é<|startoftext|><think>"
    assert tokenizer.decode([299]) == ""
    prompt = tokenizer.encode_prompt(" Hi there \n")
    assert tokenizer.decode(prompt[:1]) == "<|startoftext|>" and prompt[1] == 259 and prompt.count(261) == 1
    plain = load_tokenizer(tmp_path, "none")
    assert plain.encode_prompt("a b") == plain.encode("a b")


def test_mask_token_in_a_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="spells the mask token"):
        load_tokenizer(byte_level(tmp_path)).encode("fill <|mdm_mask|> in")


def test_byte_table_of_byte_level_tokens(tmp_path):
    tokenizer = load_tokenizer(byte_level(tmp_path))
    rows, lengths = tokenizer.byte_table()
    assert rows.shape[0] == 300 and rows.dtype == np.uint8 and lengths.dtype == np.int32
    ids = tokenizer.encode("é a\n\x00")
    assert b"".join(bytes(rows[i, : lengths[i]]) for i in ids) == "é a\n\x00".encode()
    assert {bytes(rows[i, :1]) for i in range(256)} == {bytes([b]) for b in range(256)}
    assert bytes(rows[262, : lengths[262]]) == b"<|mdm_mask|>" and lengths[264:].max() == 0


def test_byte_table_of_metaspace_tokens(tmp_path):
    folder = byte_level(tmp_path)
    vocab = {"<unk>": 0, "\u2581a": 1, "b": 2, "<0x0A>": 3, "<0xE9>": 4, "\u2581": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.add_tokens([AddedToken(f"<x{i}>", special=True) for i in range(251)])
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    rows, lengths = load_tokenizer(folder).byte_table()
    assert [bytes(rows[i, : lengths[i]]) for i in range(1, 6)] == [b" a", b"b", b"\n", b"\xe9", b" "]


def test_pieces():
    assert (
        piece("Ġx", "byte-level") == b" x"
        and piece("Ċ", "byte-level") == b"\n"
        and piece("Ã©", "byte-level") == "é".encode()
    )
    assert piece("<0x41>", "metaspace") == b"A" and piece("\u2581\u2581", "metaspace") == b"  "
    with pytest.raises(UserError, match="not spelled"):
        piece("\u2581", "byte-level")
    rows, lengths = table([b"ab", b"", b"c"], 5)
    assert rows.tolist() == [[97, 98], [0, 0], [99, 0], [0, 0], [0, 0]] and lengths.tolist() == [2, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": {"mask_token_id": 100}}, "mask_token_id = 100 is .*, which is no mask token"),
        ({"config": {"eos_token_id": 280}}, "eos_token_id = 280 is no token of the tokenizer"),
        (
            {"config": {"vocab_size": 260, "embedding_size": 260, "mask_token_id": 259}},
            "has 264 tokens, but the model 260 rows",
        ),
        ({"settings": {"eos_token": "<|eot_id|>"}}, "eos_token_id = 257 .* = 261; they do not belong together"),
        ({"settings": {"mask_token": {"content": "<think>"}}}, "mask_token is '<think>'"),
        ({"specials": (*SPECIAL[:3], "<|mask|>")}, 'template "llada" needs the token <|end_header_id|>'),
    ],
)
def test_tokens_that_disagree_are_refused(tmp_path, options, words):
    with pytest.raises(UserError, match=words.replace("|", r"\|")):
        load_tokenizer(byte_level(tmp_path, **options))


def test_absent_and_broken_files(tmp_path):
    folder = byte_level(tmp_path)
    with pytest.raises(UserError, match=r'tokenizer.template = "nice"'):
        load_tokenizer(folder, "nice")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="malformed"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer.json, nor vocab.json"):
        load_tokenizer(folder)


def test_llada_template():
    assert chat.render("llada", USER) == (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    turns = [{"role": "system", "content": "S"}, *USER, {"role": "assistant", "content": "A"}, *USER]
    assert chat.render("llada", turns) == (
        "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_dream_template():
    asked = "<|im_start|>user\n Hi there \n<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render("dream", USER) == f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{asked}"
    own = [{"role": "system", "content": "S"}, *USER]
    assert chat.render("dream", own) == f"<|im_start|>system\nS<|im_end|>\n{asked}"


def test_sdar_template():
    ask = lambda text: {"role": "user", "content": text}  # noqa: E731
    answer = lambda text: {"role": "assistant", "content": text}  # noqa: E731
    turn = lambda role, text: f"<|im_start|>{role}\n{text}<|im_end|>\n"  # noqa: E731
    end = "<|im_start|>assistant\n"
    assert chat.render("sdar", [ask("q")]) == turn("user", "q") + end
    history = [ask("q"), answer("<think>\nhm\n</think>\n\nA"), ask("r")]
    assert chat.render("sdar", history) == turn("user", "q") + turn("assistant", "A") + turn("user", "r") + end
    last = chat.render("sdar", [ask("q"), answer("<think>\nhm\n</think>\n\nA")])
    assert last == turn("user", "q") + turn("assistant", "<think>\nhm\n</think>\n\nA") + end
    assert (
        chat.render("sdar", [ask("q"), answer("A")])
        == turn("user", "q") + turn("assistant", "<think>\n\n</think>\n\nA") + end
    )


def test_embedded_tokenizers_share_the_interface():
    tokenizer = make_tokenizer("byte")
    assert tokenizer.encode_prompt("ab") == tokenizer.encode("ab") and tokenizer.end_ids == (tokenizer.eos_id,)
    assert (tokenizer.ids.mask, tokenizer.ids.pad) == (tokenizer.mask_id, tokenizer.pad_id)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """The Qwen2 vocabulary with SDAR's special tokens, as published without a tokenizer.json."""
    if not DATA.exists():
        pytest.skip("../shared/data/tokenizers is absent")
    folder = tmp_path_factory.mktemp("qwen")
    for path in (DATA / "qwen2").iterdir():
        shutil.copy(path, folder / path.name)
    content = {**hf.SDAR, "vocab_size": 151936, "mask_token_id": 151669, "eos_token_id": 151643, "pad_token_id": 151643}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_golden_ids(qwen):
    tokenizer = load_tokenizer(qwen)
    lines = (DATA / "dream_golden_ids.tsv").read_text().splitlines()
    for line in lines:
        text, ids = line.split("\t")
        assert tokenizer.encode(bytes.fromhex(text).decode()) == [int(i) for i in ids.split(",")]
    assert len(lines) == 7 and tokenizer.end_ids == (151643, 151645) and tokenizer.mask_id == 151669
    # models.md: '+' 10, '-' 12, '*' 9, '/' 14, ' ' 220, '\n' 198, digits one token each from 15 on.
    assert tokenizer.encode("7") == [22] and tokenizer.encode("\n") == [198] and tokenizer.encode("12") == [16, 17]
    rows, lengths = tokenizer.byte_table()
    text = "def f(x):\n    return x**2  # naïve <answer>42</answer>"
    ids = tokenizer.encode(text)
    assert b"".join(bytes(rows[i, : lengths[i]]) for i in ids) == text.encode() and tokenizer.decode(ids) == text


def test_a_model_with_another_models_tokenizer_is_refused(qwen, tmp_path):
    folder = tmp_path / "dream"
    shutil.copytree(qwen, folder)
    content = {
        **hf.DREAM,
        "vocab_size": 152064,
        "mask_token_id": 151666,
        "eos_token_id": 151643,
        "pad_token_id": 151643,
    }
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"mask_token_id = 151666 is '</tool_response>'"):
        load_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"].pop("151650")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="should be token 151651"):
        load_tokenizer(folder)
