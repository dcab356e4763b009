"""The values that an answer can have, as records, and how expressions are built from them.

An expression (Expr) has a number as its value and can take part in arithmetic. The other records
are what an answer may be besides: a list, an interval, words, a relation.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar


class Unreadable(Exception):
    """Not an answer of a supported kind."""


class NoValue(Unreadable):
    """Understood, but without a value (18 = 19, 1/0): the reason is "wrong", not "parse"."""


class TooBig(Exception):
    """A size cap or the work budget is exceeded."""


# Two records are equal if their classes and all fields are. A NamedTuple would not do: it equals
# every other tuple of the same fields, so that the symbol e would be the constant e.
# Frozen, because readings are cached and shared between responses.
record = dataclass(frozen=True, slots=True)


class Value:
    """What an answer is read as; `kind` says it to a user."""

    # Without it every record below would have a __dict__ next to its slots
    __slots__ = ()
    kind: ClassVar[str]


class Expr(Value):
    """A number, or a function of unknowns; only an Expr can take part in arithmetic."""

    __slots__ = ()
    kind = "an expression"


@record
class Num(Expr):
    """A rational number."""

    value: Fraction
    kind = "a number"


@record
class Sym(Expr):
    """An unknown: x, x_1, \\vec{v}."""

    name: str


@record
class Const(Expr):
    """e, i or pi."""

    name: str


@record
class Inf(Expr):
    """Infinity; sign: 1 or -1."""

    sign: int
    kind = "infinity"


@record
class Add(Expr):
    """A sum."""

    terms: tuple[Expr, ...]


@record
class Mul(Expr):
    """A product."""

    factors: tuple[Expr, ...]


@record
class Inv(Expr):
    """1 / inner."""

    inner: Expr


@record
class Pow(Expr):
    """base^exponent; roots too."""

    base: Expr
    exponent: Expr


@record
class Fn(Expr):
    """A known function under its name in mpmath, such as sin and ln."""

    name: str
    inner: Expr


@record
class App(Expr):
    """A function that is not known, such as f, of its arguments."""

    name: str
    arguments: tuple[Expr, ...]


@record
class Deg(Expr):
    """A number with a degree sign."""

    # Kept as it is, since only later is it known: a factor of pi/180 in sin, elsewhere a unit
    inner: Expr


@record
class Abs(Expr):
    """An absolute value."""

    inner: Expr


@record
class Floor(Expr):
    """Rounded down."""

    inner: Expr


@record
class Factorial(Expr):
    """inner!"""

    inner: Expr


@record
class Binom(Expr):
    """n choose k."""

    n: Expr
    k: Expr


# Sorted, so that equal units are equal tuples
UnitOf = str | tuple[tuple[str, int], ...]  # "%", or sorted pairs of unit and exponent
DEGREES: UnitOf = (("degree", 1),)


@record
class Unit(Value):
    """A number with a unit."""

    value: Expr
    unit: UnitOf
    kind = "a number with a unit"


@record
class Based(Value):
    """A number written in a base other than ten."""

    # Not an Expr: it equals only the same number in the same base
    value: int
    base: int
    kind = "a number in another base"


@record
class List(Value):
    """Several answers, in any order."""

    items: tuple[Value, ...]
    kind = "a list"


@record
class Set(Value):
    """A set in braces, as a multiset."""

    items: tuple[Value, ...]
    kind = "a set"


@record
class Tuple(Value):
    """Items in an order: a point or a vector, and with two of them perhaps an interval."""

    brackets: str  # (), [], (], [) or angle brackets
    items: tuple[Value, ...]
    kind = "a tuple or interval"


@record
class Interval:
    """The reals from `low` to `high`; low_in, high_in: whether the end belongs to them."""

    low: Expr
    low_in: bool
    high: Expr
    high_in: bool


@record
class Reals(Value):
    """A union of intervals and, as intervals of no width, of points."""

    pieces: tuple[Interval, ...]
    kind = "a set of reals"


@record
class Matrix(Value):
    """Rows of the same length."""

    rows: tuple[tuple[Expr, ...], ...]
    kind = "a matrix"


@record
class Ratio(Value):
    """3 : 4; is_clock: written as a time of day could be, 12:05."""

    # Not a quotient: 3 : 4 is not 3/4
    is_clock: bool
    parts: tuple[Expr, ...]
    kind = "a ratio"


@record
class Text(Value):
    """Words, as opposed to a formula."""

    words: str
    kind = "words"


@record
class Named(Value):
    """name = value. strict: the name is a plain one such as x, which an answer may leave out; the
    left side of a label a + b = 7 may not be left out.
    """

    name: Value
    value: Value
    strict: bool
    kind = "a named value"


@record
class Relation(Value):
    """An equation or inequality other than name = value; op: =, !=, < or <=."""

    op: str
    left: Expr
    right: Expr
    kind = "a relation"


ZERO, ONE, MINUS_ONE = Num(Fraction(0)), Num(Fraction(1)), Num(Fraction(-1))
E, I, PI = Const("e"), Const("i"), Const("pi")


def parts(value: Value) -> Iterator[Value]:
    """The records directly inside of a record."""
    for name in value.__match_args__:  # the names of its fields
        field = getattr(value, name)
        if isinstance(field, Value):
            yield field
        elif type(field) is tuple:
            for item in field:
                if isinstance(item, Value):
                    yield item


def symbols(value: Value) -> set[str]:
    """Names of the unknowns in an expression."""
    if type(value) is Sym:
        return {value.name}
    found = set()
    for part in parts(value):
        found |= symbols(part)
    return found


def contains(value: Value, kind: type[Value]) -> bool:
    """Whether a record of this class occurs in a value."""
    return type(value) is kind or any(contains(part, kind) for part in parts(value))


def has_degrees(expr: Expr) -> bool:
    """Whether there is a degree sign outside of a function, where it counts as a unit."""
    if isinstance(expr, (Deg, Fn)):
        return isinstance(expr, Deg)
    return any(map(has_degrees, parts(expr)))


def substituted(value: Any, table: Mapping[Expr, Expr]) -> Any:
    """A value with every expression that is a key of the table replaced, all at once."""
    if isinstance(value, tuple):
        return tuple(substituted(item, table) for item in value)
    if not isinstance(value, (Value, Interval)):
        return value
    if isinstance(value, Expr) and value in table:
        return table[value]
    return type(value)(*(substituted(getattr(value, f), table) for f in value.__match_args__))


# --- Building expressions -------------------------------------------------------------------------


def number(value: Value) -> Expr:
    """The expression of a plain number or angle; nothing else can take part in arithmetic."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Unit) and value.unit == DEGREES:
        return value.value
    raise Unreadable(f"arithmetic with a {type(value).__name__.lower()}")


# There is no record for a difference or a quotient: a - b is a + (-1) b, a/b is a times Inv(b)
def times(*factors: Value) -> Expr:
    """The product, with plain numbers kept plain: -3 is Num(-3)."""
    left = [factor for factor in map(number, factors) if factor != ONE]
    if len(left) == 2 and left[0] == MINUS_ONE:
        if isinstance(left[1], Num):
            return Num(-left[1].value)
        if isinstance(left[1], Inf):
            return Inf(-left[1].sign)
    return Mul(tuple(left)) if len(left) > 1 else left[0] if left else ONE


def plus(*terms: Value) -> Value:
    """Sum of one or more numbers; a single term may be any value."""
    return Add(tuple(map(number, terms))) if len(terms) > 1 else terms[0]


def negative(value: Value) -> Value:
    """A number or matrix with its sign changed."""
    return scaled(MINUS_ONE, value)


def scaled(factor: Expr, value: Value) -> Value:
    """A multiple of a number or of a matrix."""
    if isinstance(value, Matrix):
        return Matrix(tuple(tuple(times(factor, x) for x in row) for row in value.rows))
    return times(factor, value)


def over(above: Value, below: Value) -> Expr:
    """Quotient of two numbers."""
    # 1/0 can be read; it is refused when it is compared
    return Mul((number(above), Inv(number(below))))
