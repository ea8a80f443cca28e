r"""What kind of thing an answer is: one expression, several in any order, a tuple or interval, a matrix, a relation.

1331, 1728   \{1, 2\}   1 \pm \sqrt2   [0,1) \cup (2,3)     Several
(1, 2)   [2, 5)   \langle 1, 2 \rangle   12 \clock 30        Ordered, with its two brackets
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}                Matrix
y = 2x + 1   1 < x \le 2   x \in [0, 1]                      Relation
all else, without brackets round the whole                   Scalar
"""

from typing import NamedTuple

from dmpo_jax.grading.math_text import is_number

MAX_NESTING = 12
MAX_MEMBERS = 64
RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\approx", r"\in")

_OPENERS = {
    "(": ")",
    "[": "]",
    "{": "}",
    r"\{": r"\}",
    r"\langle": r"\rangle",
    r"\lfloor": r"\rfloor",
    r"\lceil": r"\rceil",
}
_CLOSERS = {closer: opener for opener, closer in _OPENERS.items()}
_SIMILAR = {"[": "(", "]": ")"}  # an interval may be half open
_SIGNS = {r"\pm": ("+", "-"), r"\mp": ("-", "+")}
_MARKS = (r"\angle", r"\triangle", r"\overline", r"\vec", r"\sin", r"\cos", r"\tan")
_SUCH_THAT = ("|", ":")

Tokens = tuple[str, ...]


class Unreadable(Exception):
    """An answer, or a part of one, in a form that is not read here."""


class Scalar(NamedTuple):
    """One expression, or anything that is not read further."""

    tokens: Tokens


class Several(NamedTuple):
    """Members in any order; `braced` where they stand in braces, so that they are no tuple."""

    members: tuple["Node", ...]
    braced: bool = False


class Ordered(NamedTuple):
    """Members in this order between two brackets: a point, a vector, an interval; or hours and minutes."""

    left: str
    right: str
    members: tuple["Node", ...]


class Matrix(NamedTuple):
    """Cells by row; a determinant is another kind of matrix than one in brackets."""

    rows: tuple[tuple["Node", ...], ...]
    is_determinant: bool


class Relation(NamedTuple):
    """Sides with the sign between each two of them; `a < b < c` has three."""

    sides: tuple["Node", ...]
    signs: tuple[str, ...]


Node = Scalar | Several | Ordered | Matrix | Relation


def read(tokens: Tokens, depth: int = 0) -> Node:
    """Read the tokens of an answer. Raises `Unreadable` where brackets do not match, nest too deeply, or a part is empty."""
    if not tokens or depth > MAX_NESTING:
        raise Unreadable
    closing = _closing(tokens)
    inner = lambda part: read(part, depth + 1)  # noqa: E731
    parts, _ = _split(tokens, (",", ";"), closing)
    if len(parts) > 1:
        return _several(tuple(map(inner, parts)))
    parts, _ = _split(tokens, (r"\cup",), closing)
    if len(parts) > 1:
        return _several(tuple(map(inner, parts)))
    parts, signs = _split(tokens, RELATIONS, closing)
    if len(parts) > 1:
        return Relation(tuple(map(inner, parts)), tuple("=" if sign == r"\approx" else sign for sign in signs))
    parts, _ = _split(tokens, (r"\clock",), closing)
    if len(parts) == 2:
        return Ordered(r"\clock", r"\clock", tuple(map(inner, parts)))
    parts, _ = _split(tokens, (":",), closing)
    if len(parts) == 2:
        return Scalar(("(", *parts[0], ")", "/", "(", *parts[1], ")"))
    if len(parts) > 2:
        return Ordered(":", ":", tuple(map(inner, parts)))
    if closing.get(0) == len(tokens) - 1:
        return _bracketed(tokens, depth)
    return _expression(tokens, depth)


def _bracketed(tokens: Tokens, depth: int) -> Node:
    left, right, inside = tokens[0], tokens[-1], tokens[1:-1]
    if left.startswith(r"\begin{"):
        return _matrix(left[7:-1], inside, depth)
    if left in (r"\lfloor", r"\lceil"):
        return Scalar(tokens)
    closing = _closing(inside)
    if left == r"\{":
        if not inside:
            return Scalar((r"\emptyset",))
        if len(_split(inside, _SUCH_THAT, closing)[0]) > 1:
            return Scalar(tokens)
        node = read(inside, depth + 1)
        return Several(node.members, braced=True) if isinstance(node, Several) else node
    parts, _ = _split(inside, (",", ";"), closing)
    if len(parts) == 1 or left == "{":
        return read(inside, depth + 1)
    if len(parts) > MAX_MEMBERS:
        raise Unreadable
    left, right = ("(", ")") if left == r"\langle" else (left, right)
    return Ordered(left, right, tuple(read(part, depth + 1) for part in parts))


def _matrix(kind: str, inside: Tokens, depth: int) -> Matrix:
    if kind not in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "Vmatrix", "smallmatrix", "array"):
        raise Unreadable
    if kind == "array" and inside[:1] == ("{",) and "}" in inside:
        inside = inside[inside.index("}") + 1 :]  # how the columns are aligned
    rows, _ = _split(inside, ("\\\\",), _closing(inside))
    if rows and not rows[-1]:
        rows.pop()
    cells = [_split(row, ("&",), _closing(row))[0] for row in rows]
    if sum(map(len, cells)) > MAX_MEMBERS:
        raise Unreadable
    return Matrix(tuple(tuple(read(cell, depth + 1) for cell in row) for row in cells), kind in ("vmatrix", "Vmatrix"))


def _expression(tokens: Tokens, depth: int) -> Node:
    r"""One expression; with one \pm in it the two that it stands for; a number before a matrix multiplies its cells."""
    begins = [i for i, token in enumerate(tokens) if token.startswith(r"\begin{")]
    if len(begins) == 1 and begins[0] and tokens[-1].startswith(r"\end{"):
        return _multiple(tokens[: begins[0]], tokens[begins[0] :], depth)
    at = [i for i, token in enumerate(tokens) if token in _SIGNS]
    if not at and tokens[:2] == ("+", "-"):
        at, tokens = [0], (r"\pm", *tokens[2:])
    if len(at) != 1:
        return Scalar(tokens)
    before, after = tokens[: at[0]], tokens[at[0] + 1 :]
    return Several(tuple(Scalar((*before, sign, *after)) for sign in _SIGNS[tokens[at[0]]]))


def _multiple(factor: Tokens, tokens: Tokens, depth: int) -> Matrix:
    factor = factor[:-1] if factor[-1] in (r"\cdot", r"\times", "*") else factor
    factor = (*factor, "1") if factor[-1:] in (("-",), ("+",)) else factor
    matrix = _bracketed(tokens, depth)
    if not factor or matrix.is_determinant or not all(isinstance(cell, Scalar) for row in matrix.rows for cell in row):
        raise Unreadable
    rows = [[Scalar(("(", *factor, ")", "*", "(", *cell.tokens, ")")) for cell in row] for row in matrix.rows]
    return Matrix(tuple(map(tuple, rows)), False)


def _several(nodes: tuple[Node, ...]) -> Several:
    members: list[Node] = []
    for node in nodes:
        # 1, 2 \pm 3 are three numbers.
        members.extend(node.members if isinstance(node, Several) and not node.braced else (node,))
    if len(members) > MAX_MEMBERS:
        raise Unreadable
    return Several(tuple(members))


def _closing(tokens: Tokens) -> dict[int, int]:
    """Where the bracket closes that opens at a place. Raises `Unreadable` unless all match."""
    result, opened = {}, []
    for i, token in enumerate(tokens):
        if token in _OPENERS or token.startswith(r"\begin{"):
            opened.append(i)
        elif token in _CLOSERS or token.startswith(r"\end{"):
            opener = _CLOSERS.get(token) or r"\begin" + token[4:]
            if not opened or _similar(tokens[opened[-1]]) != _similar(opener):
                raise Unreadable
            result[opened.pop()] = i
    if opened:
        raise Unreadable
    return result


def _similar(bracket: str) -> str:
    return _SIMILAR.get(bracket, bracket)


def _split(tokens: Tokens, separators: tuple[str, ...], closing: dict[int, int]) -> tuple[list[Tokens], list[str]]:
    """The parts between separators that stand in no bracket, and these separators."""
    parts, found, start, i = [], [], 0, 0
    while i < len(tokens):
        if i in closing:
            i = closing[i]
        elif tokens[i] in separators:
            parts.append(tokens[start:i])
            found.append(tokens[i])
            start = i + 1
        i += 1
    return [*parts, tokens[start:]], found


def name_of(node: Node) -> Tokens | None:
    r"""The tokens of something that an equation may define: x, a_1, f(x), AB, \angle A, \word{area}, (x, y)."""
    if isinstance(node, Ordered):
        names = [name_of(member) for member in node.members]
        return None if None in names else tuple(token for name in names for token in name)
    if not isinstance(node, Scalar):
        return None
    tokens = node.tokens
    marked = [token.startswith(r"\word") or token in _MARKS for token in tokens]
    if any(marked) and all(map(_in_name, tokens)):
        return tokens
    end = 0
    while end < len(tokens) and tokens[end].isalpha() and tokens[end].isupper():
        end += 1
    if end < 2:
        end = 1 if tokens[0].isalpha() or _is_greek(tokens[0]) else 0
    if not end:
        return None
    rest = tokens[end:]
    while rest[:1] == ("'",):
        rest = rest[1:]
    if rest[:1] == ("_",):
        closes = rest.index("}") if rest[1:2] == ("{",) and "}" in rest else 1
        rest = rest[closes + 1 :]
    if rest[:1] == ("(",) and rest[-1] == ")":
        rest = tuple(token for token in rest[1:-1] if token != "," and not token.isalpha() and not is_number(token))
    return tokens if not rest else None


def _in_name(token: str) -> bool:
    return token.startswith(r"\word") or token in (*_MARKS, "_", "{", "}") or token.isalpha() or _is_greek(token)


def _is_greek(token: str) -> bool:
    known = (
        r"\alpha \beta \gamma \delta \epsilon \theta \lambda \mu \phi \omega \sigma \tau \rho \psi \eta \zeta \Delta"
    )
    return token in known.split()
