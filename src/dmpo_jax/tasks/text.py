"""Where an answer stands in a text: end tokens, the answer tag, and wrappers round the whole answer.

The rules, shared with the device side in `bytes.py`:
- the text ends before the first end token written out in it;
- only the last complete `<answer>...</answer>` is graded: the last opening tag with a closing tag after it,
  up to the first such closing tag. Tags are matched letter for letter;
- an answer of more than `SPAN_BYTES` bytes between the tags is not graded;
- wrappers round the whole answer are removed, with the ASCII blanks around them: one `\\boxed{...}`, and
  outside and inside it at most one each of `$$...$$`, `$...$`, `\\(...\\)` and `\\[...\\]`, in that order.
"""

# LLaDA: eot_id, endoftext; Dream and SDAR: im_end, endoftext; Llama-3 vocabularies: eot_id, end_of_text.
END_TOKENS = (b"<|eot_id|>", b"<|endoftext|>", b"<|im_end|>", b"<|end_of_text|>")
OPEN = b"<answer>"
CLOSE = b"</answer>"
SPAN_BYTES = 256
BLANKS = b" \t\n\r\v\f"

_MATH = ((b"$$", b"$$"), (b"$", b"$"), (rb"\(", rb"\)"), (rb"\[", rb"\]"))
WRAPPERS = (*_MATH, (rb"\boxed{", b"}"), *_MATH)


def answer_of(completion: str) -> bytes:
    """The bytes of the graded answer, unwrapped and stripped; empty where there is none."""
    span = tagged(readable(completion))
    return unwrap(span) if span is not None and len(span) <= SPAN_BYTES else b""


def readable(completion: str) -> bytes:
    """The UTF-8 bytes of a completion before its first end token."""
    text = completion.encode("utf-8", "replace")
    for token in END_TOKENS:
        text = text.partition(token)[0]
    return text


def tagged(text: bytes) -> bytes | None:
    """What stands between the last complete answer tags of `readable` text; None where there are none."""
    start = text.rfind(OPEN, 0, max(text.rfind(CLOSE), 0))
    return text[start + len(OPEN) : text.find(CLOSE, start)] if start >= 0 else None


def unwrap(span: bytes) -> bytes:
    """Strip blanks and the wrappers round a whole answer."""
    span = span.strip(BLANKS)
    for left, right in WRAPPERS:
        if len(span) >= len(left) + len(right) and span.startswith(left) and span.endswith(right):
            span = span[len(left) : len(span) - len(right)].strip(BLANKS)
    return span
