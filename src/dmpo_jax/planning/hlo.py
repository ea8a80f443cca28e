"""Compiled programs, read: matmul FLOPs and collectives of one device, with every loop counted as often as it runs.

The compiler's own cost analysis counts a loop's body once, which is a hundredfold too little for a rollout. Here the text of
the optimised program is walked from its entry; how often a loop runs is read from its condition, or assumed where only
the data decide.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_ARRAY = re.compile(r"\b([a-z]+[0-9a-z]*)\[([0-9,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = ")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([^\s,)}]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program; shapes as (type, sizes) of every array of the result, operands by name."""

    name: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    rest: str
    root: bool  # whether its value is the computation's

    def attribute(self, name: str) -> str:
        """The text of `name={...}` or `name=...`; empty where there is none."""
        found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|([^\s,]+))", self.rest)
        return "" if not found else found[1] if found[1] is not None else found[2]

    def called(self, role: str) -> str:
        """The computation that plays a role (`body`, `condition`, `calls`, ...)."""
        return next((name for kind, name in _CALLED.findall(self.rest) if kind == role), "")

    @property
    def place(self) -> str:
        """The path of named scopes and loops in which the line was traced."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Collective:
    """Exchanges of one kind in one scope: `count` of them move `bytes` in all, on each device."""

    kind: str
    scope: str
    loop: bool
    count: float
    bytes: float


@dataclasses.dataclass
class Walked:
    """One run of a program on one device: FLOPs of its products and bytes that they read and write, by the scope they were
    traced in, and its collectives."""

    flops: dict[str, float]
    traffic: dict[str, float]
    collectives: list[Collective]

    @property
    def total_flops(self) -> float:
        """Over all scopes."""
        return sum(self.flops.values())


Computation = dict[str, Instruction]  # its lines by name


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Computations of an optimised program's text by name, and the name of the entry. Raises ValueError without one."""
    computations: dict[str, Computation] = {}
    entry, lines = "", None
    for line in text.splitlines():
        if lines is None:
            header = _HEADER.match(line)
            if header:
                lines = {}
                computations[header[2]] = lines
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            lines = None
        else:
            instruction = _instruction(line)
            if instruction:
                lines[instruction.name] = instruction
    if not entry:
        raise ValueError("no entry computation in the program's text")
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if not head:
        return None
    rest = line[head.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 1
    literal = opcode in ("constant", "parameter")  # a value, or a number
    operands = (rest[:end],) if literal else tuple(re.findall(r"%([^\s,()]+)", rest[:end]))
    shapes = tuple(
        (kind, tuple(int(n) for n in sizes.split(",") if n)) for kind, sizes in _ARRAY.findall(shape) if kind in BYTES
    )
    return Instruction(head[2], opcode, shapes, operands, rest[end + 1 :], bool(head[1]))


def _closing(text: str) -> int:
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return i
    return len(text) - 1


def walk(text: str, assumed: Callable[[str], float], scopes: tuple[str, ...] = ()) -> Walked:
    """FLOPs and collectives of a program's optimised text.

    `assumed(place)` is how often a loop runs whose condition only the data decide. Figures are kept apart by the first of
    `scopes` that is in a line's place, or in that of the loop it stands in (what a compiler adds has none of its own), "other"
    where none is. The branches of a conditional count as equally likely.
    """
    computations, entry = parse(text)
    flops: dict[str, float] = dict.fromkeys((*scopes, "other"), 0.0)
    traffic = dict(flops)
    found: dict[tuple[str, str, bool, float], Collective] = {}
    for instruction, computation, times, loop, around in _executed(computations, entry, assumed):
        places = instruction.place.split("/"), around.split("/")
        scope = next((s for place in places for s in scopes if s in place), "other")
        if instruction.opcode in ("dot", "convolution"):
            cost = _dot_flops if instruction.opcode == "dot" else _convolution_flops
            flops[scope] += times * cost(instruction, computation)
            touched = [instruction, *(computation[name] for name in instruction.operands[:2])]
            traffic[scope] += times * sum(map(_size, touched))
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            size = _moved(instruction)
            # Pieces of one exchange, cut up to overlap with computation, share its channel.
            channel = instruction.attribute("channel_id") or instruction.name
            old = found.get((kind, channel, loop, times))
            if old is None or old.bytes < times * size:
                found[kind, channel, loop, times] = Collective(kind, scope, loop, times, times * size)
    return Walked(flops, traffic, list(found.values()))


def _executed(
    computations: dict[str, Computation],
    name: str,
    assumed: Callable[[str], float],
    times: float = 1.0,
    loop: bool = False,
    around: str = "",
) -> Iterator[tuple[Instruction, Computation, float, bool, str]]:
    """Every instruction that runs, how often, whether in a loop, and the place of the innermost call around it that has one."""
    computation = computations[name]
    for instruction in computation.values():
        yield instruction, computation, times, loop, around
        inside = instruction.place or around
        if instruction.opcode == "while":
            count = trip_count(computations, instruction)
            count = assumed(instruction.place) if count is None else count
            yield from _executed(computations, instruction.called("body"), assumed, times * count, True, inside)
        elif instruction.opcode == "conditional":
            listed = re.findall(r"%?([^\s,{}]+)", instruction.attribute("branch_computations"))
            branches = listed or [instruction.called("true_computation"), instruction.called("false_computation")]
            for branch in branches:
                yield from _executed(computations, branch, assumed, times / len(branches), loop, inside)
        elif instruction.opcode in ("fusion", "call", "async-start"):
            inner = instruction.called("calls") or instruction.called("to_apply")
            yield from _executed(computations, inner, assumed, times, loop, inside)


def trip_count(computations: dict[str, Computation], loop: Instruction) -> float | None:
    """How often a `while` runs, at most: the constant that its condition compares a counter with; None without one."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
        return float(known[1])
    bounds = list(_bounds(computations, loop.called("condition"), ()))
    return float(min(bounds)) if bounds else None


def _bounds(computations: dict[str, Computation], name: str, arguments: tuple[int | None, ...]) -> Iterator[int]:
    """Upper bounds, exclusive, that must hold where the computation's value is true."""
    computation = computations[name]

    def constant(operand: str) -> int | None:
        instruction = computation.get(operand)
        if instruction is None:
            return None
        if instruction.opcode == "parameter":
            index = int(instruction.operands[0])
            return arguments[index] if index < len(arguments) else None
        if instruction.opcode in ("copy", "bitcast"):
            return constant(instruction.operands[0])
        whole = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.operands[0])
        return int(instruction.operands[0]) if whole else None

    def follow(instruction: Instruction) -> Iterator[int]:
        if instruction.opcode in ("and", "copy", "bitcast"):
            for operand in instruction.operands:
                yield from follow(computation[operand])
        elif instruction.opcode == "compare":
            less = {"LT": 1, "GT": 0}.get(instruction.attribute("direction"))
            bound = None if less is None else constant(instruction.operands[less])
            if bound is not None and bound > 0:
                yield bound
        elif instruction.opcode in ("fusion", "call"):
            inner = instruction.called("calls") or instruction.called("to_apply")
            yield from _bounds(computations, inner, tuple(constant(operand) for operand in instruction.operands))

    root = next((i for i in computation.values() if i.root), None)
    if root is not None:
        yield from follow(root)


def _size(instruction: Instruction) -> float:
    return sum(BYTES[kind] * math.prod(shape) for kind, shape in instruction.shapes)


def _moved(instruction: Instruction) -> float:
    """Bytes of a collective's result; of a started one, whose value is (operands, results, ...), of its results."""
    sizes = [BYTES[kind] * math.prod(shape) for kind, shape in instruction.shapes]
    if not instruction.opcode.endswith("-start") or len(sizes) < 2 or instruction.opcode.startswith("all-reduce"):
        return sum(sizes)
    count = len(instruction.operands)
    return sum(sizes[count : 2 * count])


def _dot_flops(dot: Instruction, computation: Computation) -> float:
    """2 x the elements of the result x the sizes that are summed over."""
    left = computation[dot.operands[0]].shapes[0][1]
    summed = [left[int(i)] for i in dot.attribute("lhs_contracting_dims").split(",") if i]
    return 2.0 * math.prod(dot.shapes[0][1]) * math.prod(summed)


def _convolution_flops(convolution: Instruction, computation: Computation) -> float:
    """Products of a convolution, in whose form TPU programs write matmuls; padding and dilation are not counted.

    A batch is often written as a spatial axis whose window meets each element once, so pairs are counted as they meet.
    """
    (left, right), (inputs, kernel, result) = (
        (computation[name].shapes[0][1] for name in convolution.operands[:2]),
        re.match(r"(\w+)_(\w+)->(\w+)", convolution.attribute("dim_labels")).groups(),
    )
    out, window = convolution.shapes[0][1], _window(convolution)
    count = 2.0 * out[result.index("b")] * out[result.index("f")] * right[kernel.index("i")]
    for axis in range(sum(letter.isdigit() for letter in result)):
        label = str(axis)
        at, size = np.arange(out[result.index(label)]), right[kernel.index(label)]
        reached = at[:, None] * window("stride", axis, 1) + np.arange(size) * window("rhs_dilate", axis, 1)
        reached = reached - window("pad", axis, 0)
        dilate = window("lhs_dilate", axis, 1)
        inside = (reached >= 0) & (reached <= (left[inputs.index(label)] - 1) * dilate) & (reached % dilate == 0)
        count *= int(inside.sum())
    return count / int(convolution.attribute("batch_group_count") or 1)


def _window(convolution: Instruction) -> Callable[[str, int, int], int]:
    parts = dict(part.split("=") for part in convolution.attribute("window").split() if "=" in part)

    def value(name: str, axis: int, default: int) -> int:
        return int(parts[name].split("x")[axis].split("_")[0]) if name in parts else default

    return value
