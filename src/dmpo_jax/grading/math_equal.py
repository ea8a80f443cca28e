r"""Whether an answer is the true one: as tokens first, then by kind of thing and exact values, last by math-verify.

- Expressions are equal where their values are (`math_value.py`). A unit, a percent sign or a degree sign may be missing on one
  side: 28 is 28\%, and so is 0.28.
- Several members are equal in any order, each once; a subset is not the whole. A point (1, 2) keeps its order and may lack its
  brackets. Of an interval the brackets count. x > 3 is (3, \infty).
- `x = 5` is 5, and so is `x = 2 + 3 = 5`, where what stands before the sign is a name; 2 + 3 = 5 is, 2 + 3 = 6 is neither.
  Equations and inequalities are equal where the differences of their sides are multiples of each other: 2x + 4y = 3 is a
  line, 2x - y = 3 is another, and neither is 3.
- A true answer that cannot be read here is asked of math-verify, with bounds of our own (`math_library.py`). One that cannot be
  read there either is only equal to the same tokens.
"""

import functools
from collections.abc import Callable

from dmpo_jax.grading import math_library, math_units
from dmpo_jax.grading.math_expression import Tree, parse, symbols
from dmpo_jax.grading.math_structure import (
    Matrix,
    Node,
    Ordered,
    Relation,
    Scalar,
    Several,
    Tokens,
    Unreadable,
    name_of,
    read,
)
from dmpo_jax.grading.math_text import is_ambiguous, tokens
from dmpo_jax.grading.math_value import Refused, Values, ratio, same, values

Comparison = Callable[[Node, Node], bool]

_FLIPPED = {">": "<", r"\ge": r"\le"}
_LESS = {"<": ("(", ")"), r"\le": ("[", "]")}


def equal(truth: str, answer: str) -> bool:
    """Whether an answer is right, for texts of bounded length. Never raises `RecursionError`, `Unreadable` or `Refused`."""
    for true_tokens in _readings(truth):
        for given in _readings(answer):
            if true_tokens == given != ():
                return True
            try:
                if _same(read(true_tokens), read(given)):
                    return True
            except (Unreadable, Refused, RecursionError):
                continue
    return False


@functools.lru_cache(maxsize=1024)
def _readings(text: str) -> tuple[Tokens, ...]:
    return tuple(tokens(text, grouped) for grouped in ((True, False) if is_ambiguous(text) else (True,)))


def _same(true: Node, given: Node) -> bool:
    if isinstance(true, Relation) and isinstance(given, Relation):
        return _same_relations(true, given)
    if isinstance(given, Relation):
        return _same_as_relation(true, given, _same)
    if isinstance(true, Relation):
        return _same_as_relation(given, true, _same_reversed)
    if isinstance(true, Several) and isinstance(given, Several):
        return _matched(true.members, given.members)
    for one, other, compare in ((true, given, _same), (given, true, _same_reversed)):
        if isinstance(one, Ordered) and isinstance(other, Several):
            return one.left == "(" and one.right == ")" and _in_order(one, other, compare)
        if isinstance(one, Ordered) and one.left == r"\clock" and isinstance(other, Scalar):
            return compare(_fraction(*one.members), other)
    if isinstance(true, Ordered) and isinstance(given, Ordered):
        return (true.left, true.right) == (given.left, given.right) and _each(true.members, given.members)
    if isinstance(true, Matrix) and isinstance(given, Matrix):
        return true.is_determinant == given.is_determinant and (
            len(true.rows) == len(given.rows) and all(map(_each, true.rows, given.rows))
        )
    return isinstance(true, Scalar) and isinstance(given, Scalar) and _same_scalars(true.tokens, given.tokens)


def _same_reversed(given: Node, true: Node) -> bool:
    return _same(true, given)


# ---- members


def _each(some: tuple[Node, ...], others: tuple[Node, ...], compare: Comparison = _same) -> bool:
    return len(some) == len(others) and all(map(compare, some, others))


def _matched(true: tuple[Node, ...], given: tuple[Node, ...]) -> bool:
    left = list(given)
    if len(true) != len(left):
        return False
    for member in true:
        found = next((i for i, other in enumerate(left) if _same(member, other)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _in_order(point: Ordered, several: Several, compare: Comparison) -> bool:
    r"""Whether members without brackets are a point: 1, 2, or y = 2, x = 1 in the order of the names."""
    definitions = [_definition(member) for member in several.members]
    if several.braced:
        return False
    if None in definitions:
        return _each(point.members, several.members, compare)
    by_name = sorted(definitions, key=lambda definition: definition[0])
    return _each(point.members, tuple(body for _, body in by_name), compare)


def _fraction(above: Node, below: Node) -> Node:
    if not isinstance(above, Scalar) or not isinstance(below, Scalar):
        raise Unreadable
    return Scalar(("(", *above.tokens, ")", "/", "(", *below.tokens, ")"))


# ---- relations


def _definition(node: Node) -> tuple[Tokens, Node] | None:
    """The name that a relation defines, and as what."""
    if not isinstance(node, Relation) or node.signs[0] not in ("=", r"\in"):
        return None
    name = name_of(node.sides[0])
    body = node.sides[1] if len(node.sides) == 2 else Relation(node.sides[1:], node.signs[1:])
    return None if name is None else (name, body)


def _same_as_relation(thing: Node, relation: Relation, compare: Comparison) -> bool:
    """Whether a relation says what something else, which is none, says."""
    definition = _definition(relation)
    if definition:
        return _same_as_body(thing, definition[1], compare)
    if set(relation.signs) == {"="}:
        return all(compare(thing, side) for side in relation.sides)
    interval = _interval(relation)
    return interval is not None and compare(thing, interval[1])


def _same_as_body(thing: Node, body: Node, compare: Comparison) -> bool:
    """The last side counts; sides before it may hold other names, but no other number."""
    if not isinstance(body, Relation) or set(body.signs) != {"="}:
        return compare(thing, body)
    return all(compare(thing, side) for side in body.sides if side is body.sides[-1] or _is_constant(side))


def _is_constant(node: Node) -> bool:
    return isinstance(node, Scalar) and not symbols(parse(math_units.quantity(node.tokens).value))


def _same_relations(true: Relation, given: Relation) -> bool:
    one, other = _definition(true), _definition(given)
    if one and other and one[0] == other[0]:
        if isinstance(other[1], Relation) and not isinstance(one[1], Relation):
            return _same_as_body(one[1], other[1], _same)
        if isinstance(one[1], Relation) and not isinstance(other[1], Relation):
            return _same_as_body(other[1], one[1], _same_reversed)
        if _same(one[1], other[1]):
            return True
    if len(true.sides) == len(given.sides) == 2:
        return _same_differences(true, given)
    one, other = _interval(true), _interval(given)
    if one and other:
        return one[0] == other[0] and _same(one[1], other[1])
    return true.signs == given.signs and _each(true.sides, given.sides)


def _same_differences(true: Relation, given: Relation) -> bool:
    true, given = _oriented(true), _oriented(given)
    sign = true.signs[0]
    if sign != given.signs[0] or not all(isinstance(side, Scalar) for side in (*true.sides, *given.sides)):
        return False
    one, other = (tuple(_values(side.tokens) for side in relation.sides) for relation in (true, given))
    found = ratio(one, other)
    return found > 0 if sign in _LESS else found != 0


def _oriented(relation: Relation) -> Relation:
    """With the smaller side first."""
    if not set(relation.signs) <= set(_FLIPPED):
        return relation
    return Relation(relation.sides[::-1], tuple(_FLIPPED[sign] for sign in relation.signs[::-1]))


def _interval(relation: Relation) -> tuple[Tokens, Ordered] | None:
    r"""The name and the interval of a < x \le b or x < b."""
    relation = _oriented(relation)
    if not set(relation.signs) <= set(_LESS) or len(relation.sides) > 3:
        return None
    infinity = (Scalar(("-", r"\infty")), Scalar((r"\infty",)))
    left, right = _LESS[relation.signs[0]][0], _LESS[relation.signs[-1]][1]
    if len(relation.sides) == 3:
        low, middle, high = relation.sides
    elif name_of(relation.sides[0]) is not None:
        low, middle, high, left = infinity[0], *relation.sides, "("
    else:
        low, middle, high, right = *relation.sides, infinity[1], ")"
    name = name_of(middle)
    return None if name is None else (name, Ordered(left, right, (low, high)))


# ---- expressions


def _same_scalars(true: Tokens, given: Tokens) -> bool:
    if true == given:
        return True
    true_word, given_word = _word(true), _word(given)
    if true_word and given_word and any(token.startswith(r"\word") for token in (*true, *given)):
        return true_word == given_word
    true, true_unit, true_sign = math_units.quantity(true)
    given, given_unit, given_sign = math_units.quantity(given)
    if math_units.differ(true_unit, given_unit):
        return False
    try:
        expected = _values(true)
    except Unreadable:
        return math_library.same(true, given)
    options = [(expected, _values(given))]
    if true_sign != given_sign:
        options += [(_values(true, true_sign), options[0][1]), (expected, _values(given, given_sign))]
    return any(same(one, other) for one, other in options)


def _word(tokens: Tokens) -> str | None:
    """The letters of something that is nothing but words and letters."""
    if not all(token.startswith(r"\word") or token.isalpha() for token in tokens):
        return None
    return "".join(token[6:-1] if token[0] == "\\" else token for token in tokens).casefold()


@functools.lru_cache(maxsize=1024)
def _values(tokens: Tokens, sign: str = "") -> Values:
    """The values of an expression, with a sign applied if there is one. Raises `Unreadable` or `Refused`."""
    tree: Tree = parse(tokens)
    return values((sign, tree) if sign else tree)
