"""Countdown items: random ones, and an expression that solves a given one."""

from typing import NamedTuple

import numpy as np

from dmpo_jax.tasks.splits import mix

COUNT = 3
LARGEST = 100
_SPLIT_OF_BUCKET = ("validation", "test", *["train"] * 8)
_BATCH = 4096
_OPERATORS = "+-*/"
_ATOM, _PRODUCT, _SUM = 2, 1, 0


class Node(NamedTuple):
    """An expression as text, its value as a fraction, and how tightly its last operator binds."""

    numerator: int
    denominator: int
    text: str
    level: int


def leaf(number: int) -> Node:
    """The expression that is one number."""
    return Node(number, 1, str(number), _ATOM)


def join(left: Node, operator: str, right: Node) -> Node | None:
    """`left operator right` with the brackets that it needs; None for a division by zero."""
    a, b, c, d = left.numerator, left.denominator, right.numerator, right.denominator
    if operator == "/" and c == 0:
        return None
    value = {
        "+": (a * d + c * b, b * d),
        "-": (a * d - c * b, b * d),
        "*": (a * c, b * d),
        "/": (a * d, b * c),
    }
    level = _SUM if operator in "+-" else _PRODUCT
    first = left.text if left.level >= level else f"({left.text})"
    loose = right.level < level or (right.level == level and operator in "-/")
    second = f"({right.text})" if loose else right.text
    return Node(*value[operator], f"{first}{operator}{second}", level)


def solve(numbers: list[int], target: int) -> str | None:
    """An expression that uses every number once and equals the target, or None; for up to four numbers.

    Sums and differences are tried first. The search joins two of the numbers in every way and goes on with
    one fewer.
    """
    for operators in ("+-", _OPERATORS):
        found = _search([leaf(number) for number in numbers], target, operators)
        if found:
            return found
    return None


def _search(nodes: list[Node], target: int, operators: str) -> str | None:
    if len(nodes) == 1:
        return nodes[0].text if nodes[0].numerator == target * nodes[0].denominator else None
    for i, left in enumerate(nodes):
        for j, right in enumerate(nodes):
            if i == j:
                continue
            rest = [node for k, node in enumerate(nodes) if k not in (i, j)]
            for operator in operators:
                if operator in "+*" and i > j:
                    continue
                joined = join(left, operator, right)
                found = joined and _search([joined, *rest], target, operators)
                if found:
                    return found
    return None


def wrong_expression(numbers: list[int], target: int, rng: np.random.Generator) -> str | None:
    """A left-to-right expression of all the numbers that misses the target; None where all tries hit it."""
    for _ in range(100):
        order = rng.permutation(len(numbers))
        node = leaf(numbers[order[0]])
        for index in order[1:]:
            node = join(node, _OPERATORS[rng.integers(4)], leaf(numbers[index]))
        if node.numerator != target * node.denominator:
            return node.text
    return None


def draw_items(split: str, count: int, rng: np.random.Generator) -> list[tuple[list[int], int, str]]:
    """Draw distinct items (numbers, target, expression) of a split.

    Three numbers uniform on 1 to 100; then left-to-right expressions with the numbers in random order, two
    random operators and exact division, until one lands in 1 to 100. An item's sorted numbers and target
    decide its split.
    """
    seen: set[tuple[int, ...]] = set()
    items: list[tuple[list[int], int, str]] = []
    while True:
        numbers = rng.integers(1, LARGEST + 1, (_BATCH, COUNT))
        order = np.zeros((_BATCH, COUNT), int)
        operators = np.zeros((_BATCH, COUNT - 1), int)
        target = np.zeros(_BATCH, int)
        pending = np.arange(_BATCH)
        while len(pending):
            order[pending] = np.argsort(rng.random((len(pending), COUNT)), axis=1)
            operators[pending] = rng.integers(0, 4, (len(pending), COUNT - 1))
            ordered = np.take_along_axis(numbers[pending], order[pending], axis=1)
            value, exact = ordered[:, 0], True
            for step in range(COUNT - 1):
                value, divides = _apply(value, operators[pending, step], ordered[:, step + 1])
                exact &= divides
            target[pending] = value
            pending = pending[~(exact & (value >= 1) & (value <= LARGEST))]
        mine = [_SPLIT_OF_BUCKET[bucket] == split for bucket in _bucket(numbers, target)]
        for index in np.flatnonzero(mine):
            key = (*sorted(numbers[index].tolist()), int(target[index]))
            if key in seen:
                continue
            seen.add(key)
            node, *rest = [leaf(int(numbers[index, place])) for place in order[index]]
            for operator, right in zip(operators[index], rest, strict=True):
                node = join(node, _OPERATORS[operator], right)
            items.append((numbers[index].tolist(), int(target[index]), node.text))
            if len(items) == count:
                return items


def _apply(left: np.ndarray, operator: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value of `left operator right` for positive `right`, and whether it is whole."""
    value = np.select([operator == k for k in range(4)], [left + right, left - right, left * right, left // right])
    return value, (operator < 3) | (left % right == 0)


def _bucket(numbers: np.ndarray, target: np.ndarray) -> np.ndarray:
    key = target
    for column in np.sort(numbers, axis=1).T:
        key = key * (LARGEST + 1) + column
    return mix(key) % np.uint64(len(_SPLIT_OF_BUCKET))
