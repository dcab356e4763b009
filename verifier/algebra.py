"""Values of answers: exact evaluation and typed comparison.

Nothing is equal "up to a tolerance". Rational numbers are compared as Fractions. Other constants
are equal if the rounding noise of their difference shrinks with the precision, and expressions with
unknowns if they agree at fixed points. All work is charged to a budget before it is done, so that
nothing can hang.
"""

import functools
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Self

import mpmath

from verifier.values import (
    ZERO,
    Abs,
    Add,
    App,
    Binom,
    Const,
    Deg,
    E,
    Expr,
    Factorial,
    Floor,
    Fn,
    Inf,
    Interval,
    Inv,
    List,
    Matrix,
    Mul,
    Named,
    NoValue,
    Num,
    Pow,
    Ratio,
    Reals,
    Relation,
    Set,
    Sym,
    Text,
    TooBig,
    Tuple,
    Unit,
    Unreadable,
    Value,
    contains,
    negative,
    number,
    plus,
    substituted,
    symbols,
    times,
)

MAX_POWER_BITS = 1 << 20  # 2024^{4046} has 44,438 bits
MAX_FACTORIAL, MAX_BINOMIAL = 3000, 5000
MAX_SYMBOLS = 12
MAX_BITS = 8192  # precision up to which two constants are told apart


# --- Evaluation -----------------------------------------------------------------------------------


class Budget:
    """The work that is still allowed, in nanoseconds.

    It is estimated and not measured, so that a pair of texts gets the same verdict on every machine
    and on every repetition.
    """

    def __init__(self) -> None:
        self.left = math.inf

    def charge(self, nanoseconds: float) -> None:
        """Book work before it is done; TooBig once the budget is used up."""
        self.left -= nanoseconds
        if self.left < 0:
            raise TooBig("too much work")


# One for all: verify.py lets one thread in at a time, and sets it anew for every response.
BUDGET = Budget()
charge = BUDGET.charge

# A context of our own, so that nobody else changes its precision. One Evaluator is used at a time.
MP = mpmath.MPContext()
TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
Number = Any  # a Fraction, or a real or complex number of MP


def size(number: Fraction) -> int:
    """Bits of numerator and denominator."""
    return number.numerator.bit_length() + number.denominator.bit_length()


class Evaluator:
    """Evaluate at a point {symbol: Fraction}: Fractions as long as possible, then real or complex
    numbers of `bits` precision. Two things bound the error: `top`, the largest magnitude seen (as a
    power of two), and `exact_bits`, the size of the largest Fraction that was rounded.
    """

    def __init__(self, bits: int, point: Mapping[str, Fraction] | None = None) -> None:
        self.bits, self.point, self.top, self.exact_bits = bits, point or {}, 0, 0
        self.slow = (bits / 256) ** 1.5  # mpmath's time, in that at 256 bits
        self.angle_in_degrees = False

    @classmethod
    def at_precision(cls, bits: int, point: Mapping[str, Fraction] | None = None) -> Self:
        """A new Evaluator, after setting MP to its precision, where it stays until the next one."""
        MP.prec = bits
        return cls(bits, point)

    def value(self, expr: Expr) -> Number:
        """The value of an expression; NoValue where it is not defined, TooBig beyond the caps."""
        # A flat price in ns for the calls themselves, or thousands of cheap nodes would be free
        charge(2000)
        return EVALUATE[type(expr)](self, expr)

    def inexact(self, number: Number) -> Number:
        """A Fraction rounded to a number of MP; another number as it is."""
        if not isinstance(number, Fraction):
            return number
        above, below = number.numerator.bit_length(), number.denominator.bit_length()
        self.exact_bits = max(self.exact_bits, above, below)
        # The difference of the lengths bounds log2 of the fraction
        self.top = max(self.top, above - below + 1)
        return self.rounded(number.numerator) / self.rounded(number.denominator)

    def rounded(self, integer: int) -> Number:
        """Cut to the precision first: mpmath takes a second for 10^{200000}."""
        # 64 bits are kept beyond the precision, so that cutting stays below the rounding
        cut = max(0, integer.bit_length() - self.bits - 64)
        return MP.ldexp(MP.mpf(integer >> cut), cut)

    def call(self, function: Callable, *arguments: Number, cost: float) -> Number:
        """A function of mpmath, for `cost` nanoseconds at 256 bits."""
        charge(cost * self.slow)
        try:
            return self.note(function(*arguments))
        except (ZeroDivisionError, ValueError):
            raise NoValue("a function where it is not defined") from None

    def note(self, number: Number) -> Number:
        """Book an inexact result: its cost, its magnitude, and that it is finite."""
        charge(4000 * self.slow)
        if not MP.isfinite(number):
            raise NoValue("not a finite number")
        # sqrt(-4)^2 arrives as a complex number; as a real one it can be ordered and floored
        if isinstance(number, MP.mpc) and number.imag == 0:
            number = number.real
        if number != 0:
            self.top = max(self.top, MP.mag(number))
        return number

    def plus(self, a: Number, b: Number) -> Number:
        """a + b, exactly if both are Fractions."""
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            charge(
                size(a) * size(b) / 300
            )  # adding Fractions multiplies numerators by denominators
            return a + b
        return self.note(self.inexact(a) + self.inexact(b))

    def times(self, a: Number, b: Number) -> Number:
        """a b, exactly if both are Fractions."""
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            charge(size(a) * size(b) / 300)
            return a * b
        return self.note(self.inexact(a) * self.inexact(b))

    def total(self, terms: Iterable[Expr]) -> Number:
        """The sum of expressions."""
        return functools.reduce(self.plus, map(self.value, terms))

    # The methods of the table EVALUATE: one for each kind of expression.

    def num(self, expr: Num) -> Fraction:
        """Exact."""
        return expr.value

    def sym(self, expr: Sym) -> Fraction:
        """Its coordinate of the point."""
        return self.point[expr.name]

    def const(self, expr: Const) -> Number:
        """Rounded to the precision."""
        # MP.pi is a constant without digits yet; the product with 1 has those of the precision
        return self.note({"e": MP.e, "pi": MP.pi, "i": MP.j}[expr.name] * 1)

    def inf(self, expr: Inf) -> Number:
        """Infinity is compared, but not calculated with."""
        raise Unreadable("arithmetic with infinity")

    def add(self, expr: Add) -> Number:
        """Exact as long as all terms are."""
        return self.total(expr.terms)

    def mul(self, expr: Mul) -> Number:
        """Exact as long as all factors are."""
        return functools.reduce(self.times, map(self.value, expr.factors))

    def inv(self, expr: Inv) -> Number:
        """NoValue for 1/0."""
        value = self.value(expr.inner)
        if value == 0:
            raise NoValue("division by zero")
        return 1 / value if isinstance(value, Fraction) else self.note(1 / value)

    def pow(self, expr: Pow) -> Number:
        """Real roots of negative numbers for odd denominators, (-8)^{1/3} = -2; else principal."""
        power = self.value(expr.exponent)
        if expr.base == E:
            return self.function("exp", power)  # more exact than a power of a rounded e
        base = self.value(expr.base)
        if base == 0:
            if MP.re(self.inexact(power)) < 0:
                raise NoValue("division by zero")
            # 0^0 is taken as 1
            return Fraction(int(power == 0))
        if not isinstance(power, Fraction):
            return self.general_power(base, power)
        if power.denominator == 1:
            return self.integer_power(base, power.numerator)
        if power.denominator % 2 and not isinstance(base, MP.mpc) and base < 0:
            root = self.general_power(-base, power)
            return -root if power.numerator % 2 else root
        if power == Fraction(1, 2) and isinstance(base, Fraction) and base > 0:
            # Roots of square fractions stay exact, and so does all that is made of them
            roots = math.isqrt(base.numerator), math.isqrt(base.denominator)
            if roots[0] ** 2 == base.numerator and roots[1] ** 2 == base.denominator:
                return Fraction(*roots)
        return self.general_power(base, power)

    def integer_power(self, base: Number, power: int) -> Number:
        """base^power, exactly for a Fraction."""
        if not isinstance(base, Fraction):
            return self.general_power(base, Fraction(power))
        bits = size(base) * abs(power)
        if bits > MAX_POWER_BITS and abs(base) != 1:
            raise TooBig("a power with too many digits")
        charge(0.03 * bits**1.58)  # the exponent of Karatsuba's multiplication
        return base**power

    def general_power(self, base: Number, power: Number) -> Number:
        """The principal value of base^power, rounded."""
        if power == Fraction(1, 2):
            return self.call(MP.sqrt, self.inexact(base), cost=20_000)
        base, power = self.inexact(base), self.inexact(power)
        # mag is log2 rounded up, so the sum bounds log2 of the result's bits: about 2^20 at most
        if power != 0 and MP.mag(power) + MP.mag(MP.mag(base) + 2) > 20:
            raise TooBig("a power with too many digits")
        return self.call(MP.power, base, power, cost=100_000)

    def deg(self, expr: Deg) -> Number:
        """In radians inside of a trigonometric function, else the number in degrees."""
        value = self.value(expr.inner)
        return self.times(value, self.note(MP.pi / 180)) if self.angle_in_degrees else value

    def fn(self, expr: Fn) -> Number:
        """Inside of a trigonometric function a degree sign is a factor of pi/180."""
        outer, self.angle_in_degrees = self.angle_in_degrees, expr.name in TRIGONOMETRIC
        value = self.value(expr.inner)
        self.angle_in_degrees = outer
        return self.function(expr.name, value)

    def function(self, name: str, value: Number) -> Number:
        """A function of MP by its name."""
        value = self.inexact(value)
        if value != 0 and MP.mag(value) > 20 and name not in ("ln", "asin", "acos", "atan"):
            raise TooBig("a function of a huge number")
        if value == 0 and name in ("ln", "cot", "csc"):
            raise NoValue("a function where it is not defined")
        return self.call(getattr(MP, name), value, cost=50_000)

    def app(self, expr: App) -> Fraction:
        """An unknown function: one fixed pseudo-random rational for each name and arguments.

        So f(x) + 1 equals 1 + f(x), but neither f(y) + 1 nor g(x) + 1.
        """
        values = map(self.value, expr.arguments)
        # 25 digits hide the rounding: f(sqrt(8)) and f(2 sqrt(2)) must get the same number
        shown = [str(v) if isinstance(v, Fraction) else MP.nstr(v, 25) for v in values]
        # Not hash(), which differs between processes for texts, and so would the verdict
        digest = hashlib.sha256(repr((expr.name, shown)).encode()).digest()
        return Fraction(int.from_bytes(digest[:4], "big") + 1, 1 << 30)

    def factorial(self, expr: Factorial) -> Number:
        """Exact for natural numbers, else by the gamma function."""
        n = self.value(expr.inner)
        if not isinstance(n, Fraction) or n.denominator != 1:
            return self.gamma(self.inexact(n) + 1)
        if n < 0:
            raise NoValue("the factorial of a negative number")
        if n > MAX_FACTORIAL:
            raise TooBig("a factorial above 3000!")
        charge(300 * int(n))
        return Fraction(math.factorial(int(n)))

    def gamma(self, x: Number) -> Number:
        """The gamma function; with it n! has a value at the test points, which are not integers."""
        if x != 0 and MP.mag(x) > 12 or self.bits > 1024:
            raise TooBig("a factorial above 3000!")
        return self.call(MP.gamma, x, cost=1_000_000)

    def binom(self, expr: Binom) -> Number:
        """Exact for natural numbers, else by the gamma function."""
        n, k = self.value(expr.n), self.value(expr.k)
        if all(isinstance(x, Fraction) and x.denominator == 1 and x >= 0 for x in (n, k)):
            if n > MAX_BINOMIAL:
                raise TooBig("a binomial coefficient above n = 5000")
            charge(300 * int(n))
            return Fraction(math.comb(int(n), int(k)))
        n, k = self.inexact(n), self.inexact(k)
        below = self.gamma(k + 1) * self.gamma(n - k + 1)
        return self.call(MP.fdiv, self.gamma(n + 1), below, cost=0)

    def abs(self, expr: Abs) -> Number:
        """Also of a complex number."""
        value = self.value(expr.inner)
        return abs(value) if isinstance(value, Fraction) else self.note(abs(value))

    def floor(self, expr: Floor) -> Fraction:
        """Of a real number; what is an integer up to rounding counts as one."""
        value = self.value(expr.inner)
        if isinstance(value, Fraction):
            return Fraction(math.floor(value))
        # A number this large keeps too few bits after the point to tell what its floor is
        if isinstance(value, MP.mpc) or (value != 0 and MP.mag(value) > self.bits // 2):
            raise NoValue("the floor of this number")
        nearest = MP.nint(value)  # sqrt(2) sqrt(8) may be 3.99...9
        near = abs(value - nearest) < MP.mpf(2) ** (-self.bits // 2)
        return Fraction(int(nearest if near else MP.floor(value)))


EVALUATE: dict[type[Expr], Callable[[Evaluator, Any], Number]] = {
    Num: Evaluator.num,
    Sym: Evaluator.sym,
    Const: Evaluator.const,
    Inf: Evaluator.inf,
    Add: Evaluator.add,
    Mul: Evaluator.mul,
    Inv: Evaluator.inv,
    Pow: Evaluator.pow,
    Fn: Evaluator.fn,
    App: Evaluator.app,
    Deg: Evaluator.deg,
    Abs: Evaluator.abs,
    Floor: Evaluator.floor,
    Factorial: Evaluator.factorial,
    Binom: Evaluator.binom,
}

Point = dict[str, Fraction]
# Over the prime 211, so that no point is an integer, where sin(pi x) would be 0
NUMERATORS = [n for n in range(60, 800) if n % 211]


@functools.lru_cache(64)
def points(names: tuple[str, ...], steps: bool = False) -> list[Point]:
    """Fixed points: 16 rational ones, by turns all positive and of any sign, none with an integer.

    For functions with `steps`, 48 of up to 45 in size, every other one of natural numbers.
    """
    rng, out = random.Random(20), []
    for k in range(48 if steps else 16):
        # Roots and logarithms need positive ones; the negative ones tell |x| from x
        signs = [1 if k % 2 == 0 else -1 if k == 1 else rng.choice((1, -1)) for _ in names]
        scale = Fraction(12 if steps else 1, 211)
        row = [sign * rng.choice(NUMERATORS) * scale for sign in signs]
        if steps and k % 2 == 0:
            row = [Fraction(1 + (k // 2 + 7 * j) % 24) for j in range(len(names))]
        out.append(dict(zip(names, row, strict=True)))
    return out


Difference = Callable[[Evaluator], Number]


def residue(difference: Difference, point: Point, bits: int) -> tuple[Number | None, int]:
    """|difference(Evaluator)| if that is zero up to rounding, else None; and the bits it took."""
    while True:
        work = Evaluator.at_precision(bits, point)
        value = difference(work)
        needed = 256 + 2 * work.exact_bits  # the test points alone have 18 bits
        if isinstance(value, Fraction) or needed <= bits:
            break
        if needed > MAX_BITS:
            raise TooBig("constants of very different size")
        bits = needed
    # 64 bits are left to the rounding errors that accumulate
    if value != 0 and (isinstance(value, Fraction) or MP.mag(value) > work.top - bits + 64):
        return None, bits
    return abs(value), bits


def is_zero(difference: Difference, names: Iterable[str], steps: bool = False) -> bool:
    """Whether difference(Evaluator) vanishes; with unknowns at five points, with steps at up to 48.

    What is zero up to rounding is computed again with twice the precision: rounding noise shrinks,
    but a tiny true difference does not (e^{pi sqrt 163} is 7e-13 off an integer).
    """
    names = tuple(sorted(names))
    if len(names) > MAX_SYMBOLS:
        raise TooBig("too many unknowns")
    good = 0
    for point in points(names, steps) if names else [{}]:
        try:
            noise, bits = residue(difference, point, 320)
            if noise is not None and good == 0 and not isinstance(noise, Fraction):
                again, _ = residue(difference, point, 2 * bits)
                tiny = MP.mpf(2) ** -(bits // 2)
                # Twice the bits shrink noise by about 2^-bits; a factor of 2^-(bits/2) is demanded
                if again is None or again > (noise or tiny**2) * tiny:
                    return False
        except NoValue:
            if not names:
                raise
            continue  # not defined at this point
        if noise is None:
            return False
        good += 1
        if good == 5 and not steps:  # functions with steps may agree at five points by chance
            break
    # Agreement at one or two points proves nothing about functions
    if names and good < 4:
        raise NoValue("not defined")
    return True


def equal_exprs(a: Expr, b: Expr) -> bool:
    """Same value, or the same function of the unknowns."""
    if isinstance(a, Num) and isinstance(b, Num):
        return a.value == b.value
    if isinstance(a, Inf) or isinstance(b, Inf):
        return a == b
    steps = contains(a, Floor) or contains(b, Floor)
    terms = a, negative(b)
    return is_zero(lambda work: work.total(terms), symbols(a) | symbols(b), steps)


def proportional(a: Expr, b: Expr, positive: bool = False) -> bool:
    """Whether a = c b for one constant c != 0 (c > 0 if `positive`): two forms of one equation."""
    names = symbols(a) | symbols(b)
    if not names:
        return False
    # a/b is the same at all points as at a fixed one; multiplied out, so that b may vanish
    # The last point: `is_zero` takes the first ones, and at the fixed point anything would pass
    fixed = points(tuple(sorted(names)))[-1]
    work = Evaluator.at_precision(320, fixed)
    at_fixed = [work.inexact(work.value(x)) for x in (a, b)]
    if any(x == 0 or MP.mag(x) < work.top - 192 for x in at_fixed):
        return False  # 0 = 0 would be proportional to everything
    if positive and MP.re(at_fixed[0] / at_fixed[1]) < 0:
        return False
    table = {Sym(name): Num(value) for name, value in fixed.items()}
    a_fixed, b_fixed = substituted(a, table), substituted(b, table)

    def determinant(work: Evaluator) -> Number:
        a_here, b_here = work.value(a), work.value(b)
        a_there, b_there = work.value(a_fixed), work.value(b_fixed)
        return work.plus(work.times(a_here, b_there), -work.times(b_here, a_there))

    return is_zero(determinant, names)


# --- Relations and sets of reals ------------------------------------------------------------------


def name_strength(side: Value) -> int:
    """2: a name, such as x, f(x), (x, y) or words; 1: what a problem may ask for, such as a + b;
    0: something to solve, such as x^2, or not a name at all.
    """
    if isinstance(side, (Sym, App, Text)):
        return 2
    if isinstance(side, Tuple):
        return 2 * all(map(is_name, side.items))
    if not isinstance(side, Expr):
        return 0
    called = isinstance(side, Abs) or (isinstance(side, Fn) and side.name in TRIGONOMETRIC)
    return int(len(symbols(side)) > 1 - called)  # sin x = 3/5 answers, x^2 = 42 does not


def is_name(side: Value) -> bool:
    """Whether the side can only be a name."""
    return name_strength(side) == 2


def is_closed(side: Value) -> bool:
    """Whether the side is a number without unknowns."""
    # f(2) holds no symbol, but is an unknown itself
    return isinstance(side, (Expr, Unit)) and not isinstance(side, App) and not symbols(side)


def relate(ops: list[str], sides: list[Value]) -> Value:
    """A chain such as x = 38/2 = 19 or -4 <= x < 9: a named value, a relation or a plain value."""
    if ops == ["\\in"] and is_name(sides[0]):
        return Named(sides[0], sides[1], True)
    return equation(sides) if set(ops) == {"="} else inequality(ops, sides)


def equation(sides: list[Value]) -> Value:
    """a = b = c: every side but a leading name must have the value of the last one."""
    # 3 = x means x = 3
    if len(sides) == 2 and is_name(sides[1]) and is_closed(sides[0]):
        sides = sides[::-1]
    strength = name_strength(sides[0])
    if not strength and not all(map(is_closed, sides)):
        if len(sides) > 2:
            raise Unreadable("a chain of equations")
        return Relation("=", number(sides[0]), number(sides[1]))
    values = sides[1:] if strength else sides
    values = [value for value in values[:-1] if not is_name(value)] + [values[-1]]
    if len(values) > 12:
        raise TooBig("a long chain of equations")
    # Each with each: 50% equals both 0.5 and 50, which are not equal
    if not all(same(left, right) for left, right in itertools.combinations(values, 2)):
        raise NoValue("a false chain of equations")
    return Named(sides[0], values[-1], strength == 2) if strength else values[-1]


def inequality(ops: list[str], sides: list[Value]) -> Value:
    """An inequality in one name is a set of reals (policy: x >= 6 is [6, oo)), else a relation."""
    flipped = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!="}
    if not set(ops) <= set(flipped):
        raise Unreadable("mixed relations")
    # 9 > x >= -4 is turned around, so that only < and <= remain
    if ops[0][0] == ">":
        ops, sides = [flipped[op] for op in reversed(ops)], sides[::-1]
    if len(sides) == 3 and ops[0][0] == ops[1][0] == "<" and is_name(sides[1]):
        between = Interval(number(sides[0]), "=" in ops[0], number(sides[2]), "=" in ops[1])
        return Named(sides[1], Reals((between,)), True)
    if len(sides) != 2:
        raise Unreadable("a chain of inequalities")
    for (name, end), op in ((sides, ops[0]), (sides[::-1], flipped[ops[0]])):
        if is_name(name) and is_closed(end):
            below = Interval(Inf(-1), False, number(end), op == "<=")
            above = Interval(number(end), op == ">=", Inf(1), False)
            rays = {"<": (below,), ">": (above,), "!": (below, above)}[op[0]]
            return Named(name, Reals(rays), True)
    return Relation(ops[0], number(sides[0]), number(sides[1]))


def is_ray(value: Value) -> bool:
    """Whether a value is a named set of reals, such as x > 2."""
    return isinstance(value, Named) and isinstance(value.value, Reals)


def join_rays(word: str, left: Named, right: Named) -> Named:
    """x < 1 or x > 6; x > 1 and x < 3"""
    if left.name != right.name:
        raise Unreadable("inequalities in two unknowns")
    operator = {"or": "\\cup", "and": "\\cap"}[word]
    return Named(left.name, combine(operator, left.value, right.value), True)


Pieces = tuple[Interval, ...]


def pieces_of(value: Value) -> Pieces | None:
    """The intervals of a set of reals, or None for any other value."""
    if isinstance(value, Reals):
        return value.pieces
    # Asked only next to a set of reals: alone, (1,2) may as well be a point
    if isinstance(value, Tuple) and len(value.items) == 2:
        if value.brackets in ("()", "[]", "(]", "[)"):
            (low, high), (opening, closing) = map(number, value.items), value.brackets
            return (Interval(low, opening == "[", high, closing == "]"),)
    if isinstance(value, (Set, List)):
        return tuple(Interval(number(x), True, number(x), True) for x in value.items)
    return None


def combine(operator: str, left: Value, right: Value) -> Reals:
    """Union, intersection or difference of two sets of reals."""
    a, b = pieces_of(left), pieces_of(right)
    if a is None or b is None:
        raise Unreadable("a union of things that are not sets of reals")
    if operator == "\\cup":
        return Reals(a + b)
    # De Morgan: a and b is not (not a or not b); a without b is not (not a or b)
    return Reals(complement(complement(a) + (complement(b) if operator == "\\cap" else b)))


def order(a: Expr, b: Expr) -> int:
    """-1, 0 or 1 for two real constants or infinities."""
    if isinstance(a, Inf) or isinstance(b, Inf):
        x, y = (end.sign if isinstance(end, Inf) else 0 for end in (a, b))
        return (x > y) - (x < y)
    if symbols(a) | symbols(b):
        raise Unreadable("a union with unknown ends")
    gap = Evaluator.at_precision(512).total((a, negative(b)))
    if isinstance(gap, MP.mpc):
        raise Unreadable("an interval with complex ends")
    # The sign of a rounding error is not an order: first see whether the gap is zero
    if not isinstance(gap, Fraction) and equal_exprs(a, b):
        return 0
    return (gap > 0) - (gap < 0)


def normal(pieces: Iterable[Interval]) -> Pieces:
    """Sorted, without empty intervals; overlapping and touching ones merged."""
    key = functools.cmp_to_key(order)
    out: list[Interval] = []
    # Closed before open where two begin at one point, so that the merged piece has the point
    for piece in sorted(pieces, key=lambda p: (key(p.low), not p.low_in)):
        width = order(piece.low, piece.high)
        if width > 0 or (width == 0 and not (piece.low_in and piece.high_in)):
            continue
        last = out[-1] if out else None
        overlap = order(last.high, piece.low) if last else -1
        # (1, 2) and (2, 3) touch without the 2 and stay apart
        if overlap > 0 or (overlap == 0 and (last.high_in or piece.low_in)):
            past = order(last.high, piece.high)
            if past < 0 or (past == 0 and piece.high_in):
                out[-1] = Interval(last.low, last.low_in, piece.high, piece.high_in)
        else:
            out.append(piece)
    return tuple(out)


def complement(pieces: Iterable[Interval]) -> Pieces:
    """The rest of the real line, from which intersections and differences are made."""
    out, low, low_in = [], Inf(-1), False
    for piece in normal(pieces):
        out.append(Interval(low, low_in, piece.low, not piece.low_in))
        low, low_in = piece.high, not piece.high_in
    out.append(Interval(low, low_in, Inf(1), False))
    # A ray leaves nothing between its end and infinity
    return normal(p for p in out if p.low != Inf(1) and p.high != Inf(-1))


# --- Comparison -----------------------------------------------------------------------------------


def same(a: Value, b: Value) -> bool:
    """Whether the answer `a` has the value of the label `b`."""
    charge(1000)
    kinds = {type(a), type(b)}
    if kinds & {Named, Relation}:
        return same_relation(a, b)
    if Text in kinds:
        # A chain: equal to each other, and not both None
        return letters(a) == letters(b) is not None
    if isinstance(a, (Expr, Unit)) and isinstance(b, (Expr, Unit)):
        return same_number(a, b)
    # Before sets and tuples, which may stand for points and intervals
    if Reals in kinds:
        return same_reals(pieces_of(a), pieces_of(b))
    if kinds & {List, Set}:
        return same_items(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Tuple):
        return a.brackets == b.brackets and same_sequence(a.items, b.items)
    if isinstance(a, Matrix):
        shape = list(map(len, a.rows)) == list(map(len, b.rows))
        return shape and all(
            all(map(equal_exprs, p, q)) for p, q in zip(a.rows, b.rows, strict=True)
        )
    if isinstance(a, Ratio):
        return len(a.parts) == len(b.parts) and same_ratio(a, b)
    return a == b  # numbers in another base are compared as written


def same_sequence(a: Sequence[Value], b: Sequence[Value]) -> bool:
    """The same values in the same order."""
    return len(a) == len(b) and all(map(same, a, b))


def same_number(a: Expr | Unit, b: Expr | Unit) -> bool:
    """A unit may be left out, but two must agree. p% is p/100, or p with the sign left out."""
    p, unit = (a.value, a.unit) if isinstance(a, Unit) else (a, None)
    q, wanted = (b.value, b.unit) if isinstance(b, Unit) else (b, None)
    if unit and wanted and unit != wanted:
        return False
    if isinstance(p, Sym) and isinstance(q, Sym) and q.name in tuple("ABCDE"):
        return p.name.upper() == q.name  # a choice letter
    hundredth = Num(Fraction(1, 100))
    if unit != wanted and "%" in (unit, wanted):
        shares = (times(p, hundredth), q) if unit else (p, times(q, hundredth))
        return equal_exprs(*shares) or equal_exprs(p, q)
    return equal_exprs(p, q)


def letters(value: Value) -> str | None:
    """Lower-case words; also of a symbol or a product of symbols, which could be a word."""
    if isinstance(value, Text):
        return value.words.lower()
    factors = value.factors if isinstance(value, Mul) else (value,)
    if all(isinstance(factor, (Sym, Const)) for factor in factors):
        return "".join(factor.name for factor in factors).lower()
    return None


def same_items(a: Value, b: Value) -> bool:
    """Lists and sets, as multisets. A bare list is also the tuple of the same order."""
    for one, other in ((a, b), (b, a)):
        if isinstance(other, Tuple):
            fits = isinstance(one, List) and other.brackets == "()"
            return fits and same_sequence(one.items, other.items)
        if not isinstance(other, (List, Set)):
            return isinstance(one, Set) and len(one.items) == 1 and same(one.items[0], other)
    left = list(a.items)  # greedy matching is enough, because equality is transitive
    for wanted in b.items:
        found = next((k for k, item in enumerate(left) if same(item, wanted)), None)
        if found is None:
            return False
        del left[found]
    return not left


def same_ratio(a: Ratio, b: Ratio) -> bool:
    """3 : 4 is 6 : 8, but 1:20 is not 2:40 and 12:00 is not 1:00."""
    if a.is_clock and b.is_clock:
        return all(map(equal_exprs, a.parts, b.parts))
    (p, *rest), (q, *others) = a.parts, b.parts
    pairs = [(times(p, y), times(q, x)) for x, y in zip(rest, others, strict=True)]
    nonzero = not any(equal_exprs(x, ZERO) for x in a.parts + b.parts)
    return nonzero and all(equal_exprs(*pair) for pair in pairs)


def same_reals(a: Pieces | None, b: Pieces | None) -> bool:
    """Whether two sets of reals have the same pieces; None is not a set."""
    if a is None or b is None:
        return False
    # A single piece may have unknown ends, (a, b), which cannot be sorted
    a, b = (normal(pieces) if len(pieces) > 1 else pieces for pieces in (a, b))
    return len(a) == len(b) and all(
        (p.low_in, p.high_in) == (q.low_in, q.high_in)
        and equal_exprs(p.low, q.low)
        and equal_exprs(p.high, q.high)
        for p, q in zip(a, b, strict=True)
    )


def same_relation(a: Value, b: Value) -> bool:
    """On either side the value alone is enough; two names must agree; else compare as equations."""
    if isinstance(a, Named) and isinstance(b, Named):
        if same_name(a.name, b.name) and same(renamed(a.value, a.name, b.name), b.value):
            return True
    elif isinstance(a, Named) and not isinstance(b, Relation):
        return same(a.value, b)
    elif isinstance(b, Named) and not isinstance(a, Relation):
        return b.strict and same(a, b.value)
    if not all(isinstance(x, Relation) or not is_ray(x) and isinstance(x, Named) for x in (a, b)):
        return False
    p, q = as_relation(a), as_relation(b)
    forms = plus(p.left, negative(p.right)), plus(q.left, negative(q.right))
    # A negative factor would turn an inequality around
    return p.op == q.op and proportional(*forms, positive=p.op[0] == "<")


def as_relation(value: Relation | Named) -> Relation:
    """A relation as it is; `name = value` as the equation that it also is."""
    if isinstance(value, Relation):
        return value
    sides = value.name, value.value
    return Relation("=", *(Sym(x.words) if isinstance(x, Text) else number(x) for x in sides))


def same_name(a: Value, b: Value) -> bool:
    """x and x, f(x) and f(t), but not f(x) and g(x)."""
    if not (isinstance(a, App) and isinstance(b, App)):
        return a == b
    return (a.name, len(a.arguments)) == (b.name, len(b.arguments)) and all(
        x == y or (isinstance(x, Sym) and isinstance(y, Sym))
        for x, y in zip(a.arguments, b.arguments, strict=True)
    )


def renamed(value: Value, old: Value, new: Value) -> Value:
    """The variables of f(x) = ... changed to those of f(t) = ..., and t, if it is there, to x."""
    if old == new:
        return value
    swaps = dict(zip(old.arguments, new.arguments, strict=True))
    return substituted(value, swaps | {y: x for x, y in swaps.items()})
