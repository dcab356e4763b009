"""Values of answers: exact evaluation and typed comparison.

A value is a nested tuple whose first element is its tag.

    expressions  ("num", Fraction) ("sym", name) ("const", "pi" | "e" | "i") ("inf", 1 | -1)
                 ("add", a, ...) ("mul", a, ...) ("inv", a) ("pow", a, b) ("fn", name, a)
                 ("app", name, a, ...) ("deg", a) ("abs", a) ("floor", a) ("factorial", a)
                 ("binom", n, k)
    the others   ("unit", expression, unit) ("based", value, base) ("list", a, ...) ("set", a, ...)
                 ("tuple", "()", a, ...) ("reals", (low, closed, high, closed), ...)
                 ("matrix", row, ...) ("ratio", is_clock, a, ...) ("text", words)
                 ("named", name, value, strict) ("relation", op, left, right)

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
from fractions import Fraction

import mpmath

MAX_POWER_BITS = 1 << 20  # 2024^{4046} has 44,438 bits
MAX_FACTORIAL, MAX_BINOMIAL = 3000, 5000
MAX_SYMBOLS = 12
MAX_BITS = 8192  # precision up to which two constants are told apart

EXPRESSIONS = set("num sym const inf add mul inv pow fn app deg abs floor factorial binom".split())
CONSTANTS = {"e": ("const", "e"), "i": ("const", "i"), "\\pi": ("const", "pi")}
ZERO, ONE, MINUS_ONE = (("num", Fraction(k)) for k in (0, 1, -1))
KINDS = dict.fromkeys(EXPRESSIONS, "an expression") | {
    "num": "a number",
    "inf": "infinity",
    "unit": "a number with a unit",
    "based": "a number in another base",
    "list": "a list",
    "set": "a set",
    "tuple": "a tuple or interval",
    "reals": "a set of reals",
    "matrix": "a matrix",
    "ratio": "a ratio",
    "text": "words",
    "named": "a named value",
    "relation": "a relation",
}
DEGREES = (("degree", 1),)  # a unit: sorted pairs of name and exponent, or "%"


class Unreadable(Exception):
    """Not an answer of a supported kind."""


class NoValue(Unreadable):
    """Understood, but without a value (18 = 19, 1/0): the reason is "wrong", not "parse"."""


class TooBig(Exception):
    """A size cap or the work budget is exceeded."""


# --- Building expressions -------------------------------------------------------------------------


def number(value):
    """The expression of a plain number or angle; nothing else can take part in arithmetic."""
    if value[0] == "unit" and value[2] == DEGREES:
        return value[1]
    if value[0] not in EXPRESSIONS:
        raise Unreadable(f"arithmetic with a {value[0]}")
    return value


def times(*factors):
    """The product, with plain numbers kept plain: -3 is ("num", -3)."""
    factors = [factor for factor in map(number, factors) if factor != ONE]
    if len(factors) == 2 and factors[0] == MINUS_ONE and factors[1][0] in ("num", "inf"):
        return (factors[1][0], -factors[1][1])
    return ("mul", *factors) if len(factors) > 1 else factors[0] if factors else ONE


def plus(*terms):
    """Sum of one or more numbers."""
    return ("add", *map(number, terms)) if len(terms) > 1 else terms[0]


def negative(value):
    """A number or matrix with its sign changed."""
    return scaled(MINUS_ONE, value)


def scaled(factor, value):
    """A multiple of a number or of a matrix."""
    if value[0] == "matrix":
        return ("matrix", *(tuple(times(factor, x) for x in row) for row in value[1:]))
    return times(factor, value)


def symbols(expr):
    """Names of the unknowns in an expression."""
    if expr[0] == "sym":
        return {expr[1]}
    return set().union(*(symbols(part) for part in expr[1:] if type(part) is tuple))


def contains(expr, tag):
    """Whether a node of this kind occurs in an expression."""
    return expr[0] == tag or any(contains(part, tag) for part in expr[1:] if type(part) is tuple)


def over(above, below):
    """Quotient of two numbers."""
    return ("mul", number(above), ("inv", number(below)))


def has_degrees(expr):
    """Whether there is a degree sign outside of a function, where it counts as a unit."""
    if expr[0] in ("deg", "fn"):
        return expr[0] == "deg"
    return any(type(part) is tuple and has_degrees(part) for part in expr[1:])


# --- Evaluation -----------------------------------------------------------------------------------

MP = mpmath.MPContext()  # its precision is ours alone; verify.py lets one thread in at a time
TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
_budget = [math.inf]


def set_budget(nanoseconds):
    """Allow this much work from now on. It is estimated and not measured, so that a pair of texts
    gets the same verdict on every machine and on every repetition.
    """
    _budget[0] = nanoseconds


def budget_left():
    """Nanoseconds of estimated work that are left for this pair."""
    return _budget[0]


def charge(nanoseconds):
    """Book work before it is done; TooBig once the budget is used up."""
    _budget[0] -= nanoseconds
    if _budget[0] < 0:
        raise TooBig("too much work")


def size(number):
    """Bits of numerator and denominator."""
    return number.numerator.bit_length() + number.denominator.bit_length()


class Evaluator:
    """Evaluate at a point {symbol: Fraction}: Fractions as long as possible, then real or complex
    numbers of `bits` precision. Two things bound the error: `top`, the largest magnitude seen (as a
    power of two), and `exact_bits`, the size of the largest Fraction that was rounded.
    """

    def __init__(self, bits, point=None):
        self.bits, self.point, self.top, self.exact_bits = bits, point or {}, 0, 0
        self.slow = (bits / 256) ** 1.5
        self.angle_in_degrees = False
        MP.prec = bits

    def value(self, expr):
        charge(2000)
        return getattr(self, f"do_{expr[0]}")(*expr[1:])

    def inexact(self, number):
        if not isinstance(number, Fraction):
            return number
        above, below = number.numerator.bit_length(), number.denominator.bit_length()
        self.exact_bits = max(self.exact_bits, above, below)
        self.top = max(self.top, above - below + 1)
        return self.rounded(number.numerator) / self.rounded(number.denominator)

    def rounded(self, integer):
        """Cut to the precision first: mpmath takes a second for 10^{200000}."""
        cut = max(0, integer.bit_length() - self.bits - 64)
        return MP.ldexp(MP.mpf(integer >> cut), cut)

    def call(self, function, *arguments, cost):
        """A function of mpmath, for `cost` nanoseconds at 256 bits."""
        charge(cost * self.slow)
        try:
            return self.note(function(*arguments))
        except (ZeroDivisionError, ValueError):
            raise NoValue("a function where it is not defined") from None

    def note(self, number):
        """Book an inexact result: its cost, its magnitude, and that it is finite."""
        charge(4000 * self.slow)
        if not MP.isfinite(number):
            raise NoValue("not a finite number")
        if isinstance(number, MP.mpc) and number.imag == 0:
            number = number.real
        if number != 0:
            self.top = max(self.top, MP.mag(number))
        return number

    def plus(self, a, b):
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            charge(size(a) * size(b) / 300)
            return a + b
        return self.note(self.inexact(a) + self.inexact(b))

    def times(self, a, b):
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            charge(size(a) * size(b) / 300)
            return a * b
        return self.note(self.inexact(a) * self.inexact(b))

    def do_num(self, number):
        return number

    def do_sym(self, name):
        return self.point[name]

    def do_const(self, name):
        return self.note({"e": MP.e, "pi": MP.pi, "i": MP.j}[name] * 1)

    def do_inf(self, sign):
        raise Unreadable("arithmetic with infinity")

    def do_add(self, *terms):
        return functools.reduce(self.plus, map(self.value, terms))

    def do_mul(self, *factors):
        return functools.reduce(self.times, map(self.value, factors))

    def do_inv(self, inner):
        value = self.value(inner)
        if value == 0:
            raise NoValue("division by zero")
        return 1 / value if isinstance(value, Fraction) else self.note(1 / value)

    def do_pow(self, base, exponent):
        power = self.value(exponent)
        if base == CONSTANTS["e"]:
            return self.function("exp", power)  # more exact than a power of a rounded e
        base = self.value(base)
        if base == 0:
            if MP.re(self.inexact(power)) < 0:
                raise NoValue("division by zero")
            return Fraction(int(power == 0))
        if not isinstance(power, Fraction):
            return self.general_power(base, power)
        if power.denominator == 1:
            return self.integer_power(base, power.numerator)
        if power.denominator % 2 and not isinstance(base, MP.mpc) and base < 0:
            root = self.general_power(-base, power)  # the real root of a negative number
            return -root if power.numerator % 2 else root
        if power == Fraction(1, 2) and isinstance(base, Fraction) and base > 0:
            roots = math.isqrt(base.numerator), math.isqrt(base.denominator)
            if roots[0] ** 2 == base.numerator and roots[1] ** 2 == base.denominator:
                return Fraction(*roots)
        return self.general_power(base, power)

    def integer_power(self, base, power):
        if not isinstance(base, Fraction):
            return self.general_power(base, Fraction(power))
        bits = size(base) * abs(power)
        if bits > MAX_POWER_BITS and abs(base) != 1:
            raise TooBig("a power with too many digits")
        charge(0.03 * bits**1.58)
        return base**power

    def general_power(self, base, power):
        if power == Fraction(1, 2):
            return self.call(MP.sqrt, self.inexact(base), cost=20_000)
        base, power = self.inexact(base), self.inexact(power)
        if power != 0 and MP.mag(power) + MP.mag(MP.mag(base) + 2) > 20:
            raise TooBig("a power with too many digits")
        return self.call(MP.power, base, power, cost=100_000)

    def do_deg(self, inner):
        value = self.value(inner)
        return self.times(value, self.note(MP.pi / 180)) if self.angle_in_degrees else value

    def do_fn(self, name, inner):
        outer, self.angle_in_degrees = self.angle_in_degrees, name in TRIGONOMETRIC
        value = self.value(inner)
        self.angle_in_degrees = outer
        return self.function(name, value)

    def function(self, name, value):
        value = self.inexact(value)
        if value != 0 and MP.mag(value) > 20 and name not in ("ln", "asin", "acos", "atan"):
            raise TooBig("a function of a huge number")
        if value == 0 and name in ("ln", "cot", "csc"):
            raise NoValue("a function where it is not defined")
        return self.call(getattr(MP, name), value, cost=50_000)

    def do_app(self, name, *inner):
        """An unknown function: one fixed pseudo-random rational for each name and arguments.

        So f(x) + 1 equals 1 + f(x), but neither f(y) + 1 nor g(x) + 1.
        """
        values = map(self.value, inner)
        shown = [str(v) if isinstance(v, Fraction) else MP.nstr(v, 25) for v in values]
        digest = hashlib.sha256(repr((name, shown)).encode()).digest()
        return Fraction(int.from_bytes(digest[:4], "big") + 1, 1 << 30)

    def do_factorial(self, inner):
        n = self.value(inner)
        if not isinstance(n, Fraction) or n.denominator != 1:
            return self.gamma(self.inexact(n) + 1)
        if n < 0:
            raise NoValue("the factorial of a negative number")
        if n > MAX_FACTORIAL:
            raise TooBig("a factorial above 3000!")
        charge(300 * int(n))
        return Fraction(math.factorial(int(n)))

    def gamma(self, x):
        if x != 0 and MP.mag(x) > 12 or self.bits > 1024:
            raise TooBig("a factorial above 3000!")
        return self.call(MP.gamma, x, cost=1_000_000)

    def do_binom(self, n, k):
        n, k = self.value(n), self.value(k)
        if all(isinstance(x, Fraction) and x.denominator == 1 and x >= 0 for x in (n, k)):
            if n > MAX_BINOMIAL:
                raise TooBig("a binomial coefficient above n = 5000")
            charge(300 * int(n))
            return Fraction(math.comb(int(n), int(k)))
        n, k = self.inexact(n), self.inexact(k)
        below = self.gamma(k + 1) * self.gamma(n - k + 1)
        return self.call(MP.fdiv, self.gamma(n + 1), below, cost=0)

    def do_abs(self, inner):
        value = self.value(inner)
        return abs(value) if isinstance(value, Fraction) else self.note(abs(value))

    def do_floor(self, inner):
        value = self.value(inner)
        if isinstance(value, Fraction):
            return Fraction(math.floor(value))
        if isinstance(value, MP.mpc) or (value != 0 and MP.mag(value) > self.bits // 2):
            raise NoValue("the floor of this number")
        nearest = MP.nint(value)  # sqrt(2) sqrt(8) may be 3.99...9
        near = abs(value - nearest) < MP.mpf(2) ** (-self.bits // 2)
        return Fraction(int(nearest if near else MP.floor(value)))


NUMERATORS = [n for n in range(60, 800) if n % 211]


@functools.lru_cache(64)
def points(names, steps=False):
    """Fixed points: 16 rational ones, by turns all positive and of any sign, none with an integer.

    For functions with `steps`, 48 of up to 45 in size, every other one of natural numbers.
    """
    rng, out = random.Random(20), []
    for k in range(48 if steps else 16):
        signs = [1 if k % 2 == 0 else -1 if k == 1 else rng.choice((1, -1)) for _ in names]
        scale = Fraction(12 if steps else 1, 211)
        row = [sign * rng.choice(NUMERATORS) * scale for sign in signs]
        if steps and k % 2 == 0:
            row = [Fraction(1 + (k // 2 + 7 * j) % 24) for j in range(len(names))]
        out.append(dict(zip(names, row, strict=True)))
    return out


def residue(difference, point, bits):
    """|difference(Evaluator)| if that is zero up to rounding, else None; and the bits it took."""
    while True:
        work = Evaluator(bits, point)
        value = difference(work)
        needed = 256 + 2 * work.exact_bits  # the test points alone have 18 bits
        if isinstance(value, Fraction) or needed <= bits:
            break
        if needed > MAX_BITS:
            raise TooBig("constants of very different size")
        bits = needed
    if value != 0 and (isinstance(value, Fraction) or MP.mag(value) > work.top - bits + 64):
        return None, bits
    return abs(value), bits


def is_zero(difference, names, steps=False):
    """Whether difference(Evaluator) vanishes; with unknowns at five points, with steps at up to 48.

    What is zero up to rounding is computed again with twice the precision: rounding noise shrinks,
    but a tiny true difference does not (e^{pi sqrt 163} is 1e-30 off an integer).
    """
    if len(names) > MAX_SYMBOLS:
        raise TooBig("too many unknowns")
    good = 0
    for point in points(tuple(sorted(names)), steps) if names else [{}]:
        try:
            noise, bits = residue(difference, point, 320)
            if noise is not None and good == 0 and not isinstance(noise, Fraction):
                again, _ = residue(difference, point, 2 * bits)
                tiny = MP.mpf(2) ** -(bits // 2)
                if again is None or again > (noise or tiny**2) * tiny:
                    return False
        except NoValue:
            if not names:
                raise
            continue  # not defined at this point
        if noise is None:
            return False
        good += 1
        if good == 5 and not steps:
            break
    if names and good < 4:
        raise NoValue("not defined")
    return True


def equal_exprs(a, b):
    """Same value, or the same function of the unknowns."""
    if a[0] == b[0] == "num" or "inf" in (a[0], b[0]):
        return a == b
    steps = contains(a, "floor") or contains(b, "floor")
    return is_zero(lambda work: work.do_add(a, negative(b)), symbols(a) | symbols(b), steps)


def proportional(a, b, positive=False):
    """Whether a = c b for one constant c != 0 (c > 0 if `positive`): two forms of one equation."""
    names = symbols(a) | symbols(b)
    if not names:
        return False
    # a/b is the same at all points as at a fixed one; multiplied out, so that b may vanish
    fixed = points(tuple(sorted(names)))[-1]
    work = Evaluator(320, fixed)
    at_fixed = [work.inexact(work.value(x)) for x in (a, b)]
    if any(x == 0 or MP.mag(x) < work.top - 192 for x in at_fixed):
        return False  # 0 = 0 would be proportional to everything
    if positive and MP.re(at_fixed[0] / at_fixed[1]) < 0:
        return False

    def determinant(work):
        point = work.point
        here = [work.value(x) for x in (a, b)]
        work.point = fixed
        there = [work.value(x) for x in (a, b)]
        work.point = point
        left, right = work.times(here[0], there[1]), work.times(here[1], there[0])
        return work.plus(left, -right)

    return is_zero(determinant, names)


# --- Relations and sets of reals ------------------------------------------------------------------


def is_name(side):
    """2: a name, such as x, f(x), (x, y) or words; 1: what a problem may ask for, such as a + b;
    0: something to solve, such as x^2, or no name."""
    if side[0] in ("sym", "app", "text"):
        return 2
    if side[0] == "tuple":
        return 2 * all(is_name(item) == 2 for item in side[2:])
    if side[0] not in EXPRESSIONS:
        return 0
    called = side[0] == "abs" or (side[0] == "fn" and side[1] in TRIGONOMETRIC)
    return int(len(symbols(side)) > 1 - called)  # sin x = 3/5 answers, x^2 = 42 does not


def is_closed(side):
    """Whether the side is a number without unknowns."""
    return side[0] in EXPRESSIONS | {"unit"} and not symbols(side) and side[0] != "app"


def relate(ops, sides):
    """A chain such as x = 38/2 = 19 or -4 <= x < 9: a named value, a relation or a plain value."""
    if ops == ["\\in"] and is_name(sides[0]) == 2:
        return ("named", sides[0], sides[1], True)
    return equation(sides) if set(ops) == {"="} else inequality(ops, sides)


def equation(sides):
    """a = b = c: every side but a leading name must have the value of the last one."""
    if len(sides) == 2 and is_name(sides[1]) == 2 and is_closed(sides[0]):
        sides = sides[::-1]
    strength = is_name(sides[0])
    if not strength and not all(map(is_closed, sides)):
        if len(sides) > 2:
            raise Unreadable("a chain of equations")
        return ("relation", "=", number(sides[0]), number(sides[1]))
    values = sides[1:] if strength else sides
    values = [value for value in values[:-1] if is_name(value) < 2] + [values[-1]]
    if len(values) > 12:
        raise TooBig("a long chain of equations")
    # Each with each: 50% equals both 0.5 and 50, which are not equal
    if not all(same(left, right) for left, right in itertools.combinations(values, 2)):
        raise NoValue("a false chain of equations")
    return ("named", sides[0], values[-1], strength == 2) if strength else values[-1]


def inequality(ops, sides):
    """An inequality in one name is a set of reals (policy: x >= 6 is [6, oo)), else a relation."""
    flipped = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!="}
    if not set(ops) <= set(flipped):
        raise Unreadable("mixed relations")
    if ops[0][0] == ">":
        ops, sides = [flipped[op] for op in reversed(ops)], sides[::-1]
    if len(sides) == 3 and ops[0][0] == ops[1][0] == "<" and is_name(sides[1]) == 2:
        ends = number(sides[0]), "=" in ops[0], number(sides[2]), "=" in ops[1]
        return ("named", sides[1], ("reals", ends), True)
    if len(sides) != 2:
        raise Unreadable("a chain of inequalities")
    for (name, end), op in ((sides, ops[0]), (sides[::-1], flipped[ops[0]])):
        if is_name(name) == 2 and is_closed(end):
            below = (("inf", -1), False, number(end), op == "<=")
            above = (number(end), op == ">=", ("inf", 1), False)
            rays = {"<": [below], ">": [above], "!": [below, above]}[op[0]]
            return ("named", name, ("reals", *rays), True)
    return ("relation", ops[0], number(sides[0]), number(sides[1]))


def is_ray(value):
    """Whether a value is a named set of reals, such as x > 2."""
    return value[0] == "named" and value[2][0] == "reals"


def join_rays(word, left, right):
    """x < 1 or x > 6; x > 1 and x < 3"""
    if left[1] != right[1]:
        raise Unreadable("inequalities in two unknowns")
    operator = {"or": "\\cup", "and": "\\cap"}[word]
    return ("named", left[1], combine(operator, left[2], right[2]), True)


def pieces_of(value):
    """The intervals (low, closed, high, closed) of a set of reals, or None."""
    if value[0] == "reals":
        return value[1:]
    if value[0] == "tuple" and len(value) == 4 and value[1] in ("()", "[]", "(]", "[)"):
        return ((number(value[2]), value[1][0] == "[", number(value[3]), value[1][1] == "]"),)
    if value[0] in ("set", "list"):
        return tuple((number(point), True, number(point), True) for point in value[1:])
    return None


def combine(operator, left, right):
    """Union, intersection or difference of two sets of reals."""
    a, b = pieces_of(left), pieces_of(right)
    if a is None or b is None:
        raise Unreadable("a union of things that are not sets of reals")
    if operator == "\\cup":
        return ("reals", *a, *b)
    return ("reals", *complement(complement(a) + (complement(b) if operator == "\\cap" else b)))


def order(a, b):
    """-1, 0 or 1 for two real constants or infinities."""
    if "inf" in (a[0], b[0]):
        ranks = [x[1] if x[0] == "inf" else 0 for x in (a, b)]
        return (ranks[0] > ranks[1]) - (ranks[0] < ranks[1])
    if symbols(a) | symbols(b):
        raise Unreadable("a union with unknown ends")
    gap = Evaluator(512).do_add(a, negative(b))
    if isinstance(gap, MP.mpc):
        raise Unreadable("an interval with complex ends")
    if not isinstance(gap, Fraction) and equal_exprs(a, b):
        return 0
    return (gap > 0) - (gap < 0)


def normal(pieces):
    """Sorted, without empty intervals; overlapping and touching ones merged."""
    key, out = functools.cmp_to_key(order), []
    for low, low_in, high, high_in in sorted(pieces, key=lambda p: (key(p[0]), not p[1])):
        width = order(low, high)
        if width > 0 or (width == 0 and not (low_in and high_in)):
            continue
        overlap = order(out[-1][2], low) if out else -1
        if overlap > 0 or (overlap == 0 and (out[-1][3] or low_in)):
            past = order(out[-1][2], high)
            if past < 0 or (past == 0 and high_in):
                out[-1] = (*out[-1][:2], high, high_in)
        else:
            out.append((low, low_in, high, high_in))
    return tuple(out)


def complement(pieces):
    """The rest of the real line, from which intersections and differences are made."""
    out, low, low_in = [], ("inf", -1), False
    for piece in normal(pieces):
        out.append((low, low_in, piece[0], not piece[1]))
        low, low_in = piece[2], not piece[3]
    out.append((low, low_in, ("inf", 1), False))
    return normal(p for p in out if p[0] != ("inf", 1) and p[2] != ("inf", -1))


# --- Comparison -----------------------------------------------------------------------------------


def same(a, b):
    """Whether the answer `a` has the value of the label `b`."""
    charge(1000)
    tags = {a[0], b[0]}
    if tags & {"named", "relation"}:
        return same_relation(a, b)
    if "text" in tags:
        return letters(a) == letters(b) is not None
    if tags <= EXPRESSIONS | {"unit"}:
        return same_number(a, b)
    if "reals" in tags:
        return same_reals(pieces_of(a), pieces_of(b))
    if tags & {"list", "set"}:
        return same_items(a, b)
    if a[0] != b[0] or len(a) != len(b):
        return False
    if a[0] == "tuple":
        return a[1] == b[1] and all(map(same, a[2:], b[2:]))
    if a[0] == "matrix":
        shape = list(map(len, a[1:])) == list(map(len, b[1:]))
        return shape and all(all(map(equal_exprs, p, q)) for p, q in zip(a[1:], b[1:], strict=True))
    if a[0] == "ratio":
        return same_ratio(a, b)
    return a == b  # numbers in another base are compared as written


def same_number(a, b):
    """A unit may be left out, but two must agree. p% is p/100, or p with the sign left out."""
    (p, unit), (q, wanted) = ((x[1], x[2]) if x[0] == "unit" else (x, None) for x in (a, b))
    if unit and wanted and unit != wanted:
        return False
    if p[0] == q[0] == "sym" and q[1] in tuple("ABCDE"):
        return p[1].upper() == q[1]  # a choice letter
    hundredth = ("num", Fraction(1, 100))
    if unit != wanted and "%" in (unit, wanted):
        shares = (times(p, hundredth), q) if unit else (p, times(q, hundredth))
        return equal_exprs(*shares) or equal_exprs(p, q)
    return equal_exprs(p, q)


def letters(value):
    """Lower-case words; also of a symbol or a product of symbols, which could be a word."""
    if value[0] == "text":
        return value[1].lower()
    factors = value[1:] if value[0] == "mul" else (value,)
    if all(factor[0] in ("sym", "const") for factor in factors):
        return "".join(factor[1] for factor in factors).lower()
    return None


def same_items(a, b):
    """Lists and sets, as multisets. A bare list is also the tuple of the same order."""
    for one, other in ((a, b), (b, a)):
        if other[0] not in ("list", "set"):
            if other[0] == "tuple":
                fits = one[0] == "list" and other[1] == "()" and len(one) + 1 == len(other)
                return fits and all(map(same, one[1:], other[2:]))
            return one[0] == "set" and len(one) == 2 and same(one[1], other)
    left = list(a[1:])  # greedy matching is enough, because equality is transitive
    for wanted in b[1:]:
        found = next((k for k, item in enumerate(left) if same(item, wanted)), None)
        if found is None:
            return False
        del left[found]
    return not left


def same_ratio(a, b):
    """3 : 4 is 6 : 8, but 1:20 is not 2:40 and 12:00 is not 1:00."""
    if a[1] and b[1]:
        return all(map(equal_exprs, a[2:], b[2:]))
    pairs = [(times(a[2], y), times(b[2], x)) for x, y in zip(a[3:], b[3:], strict=True)]
    nonzero = not any(equal_exprs(x, ZERO) for x in a[2:] + b[2:])
    return nonzero and all(equal_exprs(*pair) for pair in pairs)


def same_reals(a, b):
    """Whether two sets of reals have the same pieces; None is no set."""
    if a is None or b is None:
        return False
    a, b = (normal(pieces) if len(pieces) > 1 else pieces for pieces in (a, b))
    return len(a) == len(b) and all(
        p[1] == q[1] and p[3] == q[3] and equal_exprs(p[0], q[0]) and equal_exprs(p[2], q[2])
        for p, q in zip(a, b, strict=True)
    )


def same_relation(a, b):
    """On either side the value alone is enough; two names must agree; else compare as equations."""
    if a[0] == b[0] == "named":
        if same_name(a[1], b[1]) and same(renamed(a[2], a[1], b[1]), b[2]):
            return True
    elif a[0] == "named" and b[0] != "relation":
        return same(a[2], b)
    elif b[0] == "named" and a[0] != "relation":
        return b[3] and same(a, b[2])
    if not all(x[0] == "relation" or (x[0] == "named" and not is_ray(x)) for x in (a, b)):
        return False
    (op, left, right), (other_op, *others) = map(as_relation, (a, b))
    forms = plus(left, negative(right)), plus(others[0], negative(others[1]))
    return op == other_op and proportional(*forms, positive=op[0] == "<")


def as_relation(value):
    """(sign, left, right) of a relation or of `name = value`."""
    if value[0] == "relation":
        return value[1:]
    return "=", *(("sym", x[1]) if x[0] == "text" else number(x) for x in value[1:3])


def same_name(a, b):
    """x and x, f(x) and f(t), but not f(x) and g(x)."""
    if a[0] == b[0] == "app" and a[1] == b[1] and len(a) == len(b):
        return all(x[0] == y[0] == "sym" or x == y for x, y in zip(a[2:], b[2:], strict=True))
    return a == b


def renamed(value, old, new):
    """Rename the variables of f(x) = ... to those of f(t) = ..."""
    if old == new:
        return value
    swaps = list(zip(old[2:], new[2:], strict=True))
    table = dict(swaps) | {y: x for x, y in swaps}

    def rename(part):
        return table.get(part) or tuple(rename(x) if type(x) is tuple else x for x in part)

    return rename(value)
