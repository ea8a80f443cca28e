r"""Reading one mathematical expression: tokens to a tree.

    sum      = [ sign ] term { ( "+" | "-" ) term }
    term     = factor { [ "*" | "/" | \cdot | \times | \div ] factor }      a number follows only after a sign of operation
    factor   = { sign } atom { "!" | "%" | \degree | "^" argument }
    atom     = number [ \frac of two whole numbers, the smaller above: a mixed number ] | digits "_" base
             | variable | \pi | "(" sum ")" | "[" sum "]" | "{" sum "}" | "|" sum "|" | \lfloor sum \rfloor | \lceil sum \rceil
             | \frac argument argument | \binom argument argument | \sqrt [ "[" sum "]" ] argument
             | function [ "_" argument ] [ "^" argument ] ( bracket | factors up to the next function or sign )
    argument = "{" sum "}" | "(" sum ")" | number | atom          after \frac and \binom one digit is an argument

`1/2x` is half of x, as products are taken from left to right. `e` and `i` are the numbers. A variable may have an index
and primes; f, g and h before a bracket, words and marked letters such as \vec v are unknowns of their own.
Trees are tuples of an operation's name and its operands.
"""

from fractions import Fraction

from dmpo_jax.grading.math_structure import Tokens, Unreadable
from dmpo_jax.grading.math_text import is_number

MAX_DEPTH = 24
MAX_CALLS = 12  # of functions in one expression

Tree = tuple

_PRODUCT = {"*": "*", r"\cdot": "*", r"\times": "*", "/": "/", r"\div": "/"}
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_ROUNDED = {r"\lfloor": "floor", r"\lceil": "ceil"}
_MARKS = (r"\vec", r"\overline", r"\hat", r"\bar", r"\tilde", r"\overrightarrow", r"\widehat")
_BEGINNING = (*_MARKS, r"\frac", r"\binom", r"\sqrt", r"\pi")
_LETTERS = (
    r"\alpha \beta \gamma \delta \epsilon \zeta \eta \theta \iota \kappa \lambda \mu \nu \xi \rho \sigma \tau \upsilon \phi "
    r"\chi \psi \omega \Gamma \Delta \Theta \Lambda \Sigma \Phi \Psi \Omega \infty \emptyset \ell"
)
_NAMES = r"\sin \cos \tan \cot \sec \csc \arcsin \arccos \arctan \sinh \cosh \tanh \log \ln \lg \exp"
_SYMBOLS, _FUNCTIONS = frozenset(_LETTERS.split()), frozenset(_NAMES.split())


def parse(tokens: Tokens) -> Tree:
    """The tree of an expression. Raises `Unreadable` where it is none of the grammar above, or nests too deeply."""
    reader = _Reader(tokens)
    tree = reader.sum()
    if reader.next:
        raise Unreadable
    return tree


def symbols(tree: Tree) -> frozenset[str]:
    """The names of all variables in a tree."""
    if tree[0] == "symbol":
        return frozenset((tree[1],))
    return frozenset().union(*(symbols(part) for part in tree[1:] if isinstance(part, tuple)))


class _Reader:
    def __init__(self, tokens: Tokens):
        self.tokens, self.at, self.depth, self.bars, self.calls = list(tokens), 0, 0, 0, 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.next
        if not token or (expected and token not in expected):
            raise Unreadable
        self.at += 1
        return token

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable
        tree = self.term()
        while self.next in ("+", "-"):
            tree = (self.take(), tree, self.term())
        self.depth -= 1
        return tree

    def term(self) -> Tree:
        tree = self.factor()
        while True:
            if self.next in _PRODUCT:
                tree = (_PRODUCT[self.take()], tree, self.factor())
            elif self.begins_factor():
                tree = ("*", tree, self.power())
            else:
                return tree

    def factor(self) -> Tree:
        negative = False
        while self.next in ("+", "-"):
            negative ^= self.take() == "-"
        return ("neg", self.power()) if negative else self.power()

    def begins_factor(self) -> bool:
        """Whether what follows multiplies without a sign of operation."""
        token = self.next
        if token == "|":
            return not self.bars
        if token == "{" and any(map(is_number, self.tokens[self.at + 1 : self.at + 2])):
            return False  # 4{10} is printed as 410
        known = token in _CLOSING or token in _SYMBOLS or token in _FUNCTIONS or token in _BEGINNING
        return known or token.startswith(r"\word") or (token.isalpha() and token.isascii())

    def power(self) -> Tree:
        tree = self.atom()
        while self.next in ("!", "^", "%", r"\degree"):
            sign = self.take()
            if sign == "^":
                tree = ("^", tree, self.argument())
                if self.next == "^":
                    raise Unreadable
            elif sign == "!" and self.next == "!":
                raise Unreadable
            else:
                tree = (sign, tree)
        return tree

    def atom(self) -> Tree:
        token = self.take()
        if is_number(token):
            return self.number(token)
        if token in _CLOSING:
            tree = self.sum()
            self.take(_CLOSING[token])
            return (_ROUNDED[token], tree) if token in _ROUNDED else tree
        if token == "|":
            return self.absolute()
        if token in (r"\frac", r"\binom"):
            return ("/" if token == r"\frac" else "binom", self.argument(digits=1), self.argument(digits=1))
        if token == r"\sqrt":
            return self.root()
        if token in _FUNCTIONS:
            return self.function(token)
        if token in ("e", "i", r"\pi") and self.next != "_":
            return ("constant", token)
        return self.symbol(token)

    def number(self, token: str) -> Tree:
        if self.next == "_":
            self.take()
            return ("symbol", f"{token}_{self.name()}")
        whole = ("number", Fraction(token))
        if self.next != r"\frac" or "." in token:
            return whole
        start = self.at
        fraction = self.atom()
        parts = [part[1] for part in fraction[1:] if part[0] == "number" and part[1].denominator == 1]
        if len(parts) < 2:
            self.at = start
            return whole
        if parts[0] >= parts[1]:
            raise Unreadable  # 2\frac{5}{3}: a product, or a mixed number gone wrong
        return ("+", whole, fraction)

    def absolute(self) -> Tree:
        if self.bars:
            raise Unreadable
        self.bars += 1
        tree = self.sum()
        self.take("|")
        self.bars -= 1
        return ("abs", tree)

    def root(self) -> Tree:
        degree = ("number", Fraction(2))
        if self.next == "[":
            self.take()
            degree = self.sum()
            self.take("]")
        return ("root", self.argument(), degree)

    def function(self, token: str) -> Tree:
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise Unreadable
        name, base, exponent = token[1:], (), None
        if self.next == "_" and name == "log":
            self.take()
            base = (self.argument(),)
        if self.next == "^":
            self.take()
            exponent = self.argument()
        if self.next in _CLOSING or self.next == "|":
            operand = self.atom()
        else:
            operand = self.factor()
            while self.begins_factor() and self.next not in (*_FUNCTIONS, "("):
                operand = ("*", operand, self.power())
        if exponent == ("neg", ("number", Fraction(1))) and name in ("sin", "cos", "tan"):
            return ("call", f"arc{name}", operand)
        tree = ("call", name, operand, *base)
        return ("^", tree, exponent) if exponent else tree

    def argument(self, digits: int = 0) -> Tree:
        """What a command or ^ applies to; of a number at most so many digits, all of them if 0."""
        token = self.next
        if token in ("+", "-"):
            return self.factor()
        if token and is_number(token):
            if digits and len(token) > digits:
                if "." in token:
                    raise Unreadable
                self.tokens[self.at : self.at + 1] = [token[:digits], token[digits:]]
            return ("number", Fraction(self.take()))
        return self.atom()

    def symbol(self, token: str) -> Tree:
        if token in _MARKS:
            name = token + self.name()
        elif token.startswith(r"\word"):
            name = token.lower()
        elif (token.isalpha() and token.isascii()) or token in _SYMBOLS:
            name = token
        else:
            raise Unreadable
        if token in ("f", "g", "h") and self.next == "(":
            return ("symbol", name + self.name())
        if self.next == "_":
            self.take()
            name += f"_{self.name()}"
        while self.next == "'":
            name += self.take()
        return ("symbol", name)

    def name(self) -> str:
        """The tokens of a bracket, or one token, as they are."""
        token = self.take()
        if token not in _CLOSING:
            return token
        start, depth = self.at, 1
        while depth:
            depth += {token: 1, _CLOSING[token]: -1}.get(self.take(), 0)
        return " ".join(self.tokens[start : self.at - 1])
