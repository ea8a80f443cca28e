"""Chat templates: how each family writes a conversation out as text, special tokens spelled."""

from collections.abc import Sequence

from dmpo_jax.errors import UserError

Message = dict[str, str]  # role ("system", "user" or "assistant") and content

QWEN_SYSTEM = "You are a helpful assistant."


def render(template: str, messages: Sequence[Message]) -> str:
    """A conversation up to where the assistant's next answer begins. Raises UserError on an unknown template."""
    if template not in TEMPLATES:
        raise UserError(f'tokenizer.template = "{template}": expected one of {", ".join(TEMPLATES)}')
    return TEMPLATES[template][0](messages)


def special_tokens(template: str) -> tuple[str, ...]:
    """The special tokens that a template spells out."""
    return TEMPLATES[template][1]


def _llada(messages: Sequence[Message]) -> str:
    turns = [f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content'].strip()}<|eot_id|>" for m in messages]
    return f"<|startoftext|>{''.join(turns)}<|start_header_id|>assistant<|end_header_id|>\n\n"


def _turns(messages: Sequence[Message]) -> str:
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return f"{''.join(turns)}<|im_start|>assistant\n"


def _dream(messages: Sequence[Message]) -> str:
    system = [] if messages and messages[0]["role"] == "system" else [{"role": "system", "content": QWEN_SYSTEM}]
    return _turns([*system, *messages])


def _sdar(messages: Sequence[Message]) -> str:
    # Thoughts of earlier answers are left out; after the last question they are kept (Qwen3's template).
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    turns = []
    for i, m in enumerate(messages):
        content = m["content"]
        if m["role"] == "assistant":
            before, closed, after = content.rpartition("</think>")
            thought, content = "", content
            if closed:
                content = after.lstrip("\n")
                thought = before.partition("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            if i > last and (thought or i == len(messages) - 1):
                thought = thought.strip("\n")
                content = f"<think>\n{thought}\n</think>\n\n" + content.lstrip("\n")
        turns.append({"role": m["role"], "content": content})
    return _turns(turns)


def _none(messages: Sequence[Message]) -> str:
    return "".join(m["content"] for m in messages)


_IM = ("<|im_start|>", "<|im_end|>")
TEMPLATES = {
    "none": (_none, ()),
    "llada": (_llada, ("<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "dream": (_dream, _IM),
    "sdar": (_sdar, _IM),
}
