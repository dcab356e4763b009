"""Read an answer, in LaTeX or plain text, into a value (see values.py). Never executes anything.

variants   known Unicode to LaTeX; the different ways to read an ambiguous text
tokenize   characters to tokens; words inside \\text{...} are told from letters of a formula
Parser     recursive descent, tokens to a value
"""

import collections
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from verifier.algebra import combine, is_ray, join_rays, relate
from verifier.values import (
    DEGREES,
    MINUS_ONE,
    ONE,
    PI,
    Abs,
    App,
    Based,
    Binom,
    Deg,
    E,
    Expr,
    Factorial,
    Floor,
    Fn,
    I,
    Inf,
    Interval,
    Inv,
    List,
    Matrix,
    Mul,
    Named,
    Num,
    Pow,
    Ratio,
    Reals,
    Set,
    Sym,
    Text,
    TooBig,
    Tuple,
    Unit,
    UnitOf,
    Unreadable,
    Value,
    has_degrees,
    negative,
    number,
    over,
    plus,
    scaled,
    symbols,
    times,
)

MAX_TOKENS = 1200
MAX_DEPTH = 60  # of nesting; a level takes about nine of the 1000 nested calls of Python
MAX_EXPONENT = 5000  # of 1e5000

# --- Characters to tokens -------------------------------------------------------------------------


class Token(NamedTuple):
    """kind: num, sym (one letter), word, cmd or op; in_text: it stood inside \\text{...}."""

    kind: str
    text: str
    in_text: bool = False


GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi "
    "chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
GREEK = dict(zip("αβγδεζηθικλμνξρστφχψωΓΔΘΛΞΠΣΦΨΩ", GREEK_NAMES.split(), strict=True))
LETTERS = {f"\\{name}" for name in [*GREEK.values(), "upsilon", "hbar", "ell"]}
# A fixed list and not NFKC, which would turn 5² into 52. Any other non-ASCII character is refused.
UNICODE = str.maketrans({char: f"\\{name} " for char, name in GREEK.items()} | {
    "π": "\\pi ", "−": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "√": "\\sqrt ",
    "∛": "\\sqrt[3]", "°": "@", "∞": "\\infty ", "±": "\\pm ", "∓": "\\mp ", "≤": "<=", "≥": ">=",
    "⩽": "<=", "⩾": ">=", "≠": "\\ne ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ",
    "∖": "\\setminus ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "⌊": "\\lfloor ", "⌋": "\\rfloor ",
    "⌈": "\\lceil ", "⌉": "\\rceil ", "′": "'", "’": "'", "∠": "\\angle ", "¼": "\\frac14 ",
    "½": "\\frac12 ", "¾": "\\frac34 ", "⅓": "\\frac13 ", "⅔": "\\frac23 ", "€": "\\euro ",
    "£": "\\pounds ", "¥": "\\yen ", "¢": "\\text{cents}", "\u00a0": " ", "\u2009": " ",
    "\u202f": " ",
})  # fmt: skip
SCRIPTS = {
    "^": dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True)),
    "_": dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)),
}
# Digit groups that can only be one number: 48{,}625  48,\!625  48\,625  48 625
# \1: one separator throughout, since 48\,625 231 is not one number
GROUPED = re.compile(
    r"(?<![\d.])\d{1,3}(\{,\}|,\\!\s*|\\[,;:! ]|~| )\d{3}(?:\1\d{3})*(?!\1?\d)", re.ASCII
)
# Digit groups that may be one number or a list: 48,625. Not 0,125 and not 1,200,30
COMMAS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", re.ASCII)
# @ stands for the degree sign from here on
DEGREE = re.compile(r"(?:\{\s*\})?\^\s*(?:\\circ|\{\s*\\circ\s*\})")
PRIME = re.compile(r"\^\s*(?:\\prime|\{\s*(?:(?:\\prime|')\s*)+\})")
# The alternatives are tried in this order: 1e5 is a number before e is a letter
TOKEN = re.compile(
    r"\\(?P<macro>text\w*|mbox|math(?!bb)\w+|operatorname|boldsymbol|bm|emph|underline)\s*"
    r"\{(?P<inner>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
    r"|(?P<num>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)|(?P<cmd>\\(?:[A-Za-z]+|.|\Z))"
    r"|(?P<word>[A-Za-z]+)|(?P<op>[<>]=|[-+*/^_=<>()\[\]{}|,;:!'%.&@])|(?P<space>[\s$~]+)|(?P<bad>.)",
    re.ASCII | re.DOTALL,
)
# After the backslash: delimiters of formulas \( \) \[ \], spaces \, \; \: \! and sizes of brackets
IGNORED = set(
    "boxed fbox left right displaystyle textstyle limits quad qquad big Big bigl bigr Bigl Bigr "
    "bigg Bigg rm bf text textbf textrm mathrm mathbf , ; : ! ( ) [ ]".split()
) | {" ", "\n", ""}  # fmt: skip
# Policy: \log is the natural logarithm, \lg that to base ten
FUNCTIONS = {name: name for name in "sin cos tan cot sec csc sinh cosh tanh ln lg exp".split()} | {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "log": "ln",
}  # fmt: skip
SYNONYMS = {
    "times": "*", "cdot": "*", "ast": "*", "div": "/", "dfrac": "\\frac", "tfrac": "\\frac",
    "cfrac": "\\frac", "sfrac": "\\frac", "nicefrac": "\\frac", "dbinom": "\\binom",
    "tbinom": "\\binom", "leq": "<=", "le": "<=", "leqslant": "<=", "geq": ">=", "ge": ">=",
    "geqslant": ">=", "lt": "<", "gt": ">", "neq": "!=", "ne": "!=", "lbrace": "\\{",
    "rbrace": "\\}", "lbrack": "[", "rbrack": "]", "lvert": "|", "rvert": "|", "vert": "|",
    "mid": "|", "%": "%", "lor": "or", "vee": "or", "land": "and", "wedge": "and",
    "varphi": "\\phi", "varepsilon": "\\epsilon", "vartheta": "\\theta",
    "varnothing": "\\emptyset", "textdollar": "\\$", "degree": "@", "deg": "@", "colon": ":",
    "backslash": "\\setminus", "pound": "\\pounds", "measuredangle": "\\angle",
}  # fmt: skip
WORDS = {name: f"\\{name}" for name in [*FUNCTIONS, "sqrt", "pi"]} | {
    "oo": "\\infty", "inf": "\\infty", "infty": "\\infty", "infinity": "\\infty",
    "or": "or", "and": "and",
}  # fmt: skip


def tokenize(text: str, in_text: bool = False) -> list[Token]:
    """Text in ASCII -> list of Token.

    in_text: this is the inside of \\text{...} or the like. TooBig above MAX_TOKENS.
    """
    tokens = []
    for match in TOKEN.finditer(text):
        kind, part = match.lastgroup, match[0]
        if kind == "bad":
            raise Unreadable(f"the character {part!r}")
        if kind == "inner":
            inner = tokenize(match["inner"], True)
            # \mathbf{x+1}^2 must stay a group, \text{cm}^2 must not become one
            macro = match["macro"]
            is_text = macro in ("mbox", "mathrm") or macro.startswith("text")
            group = len(inner) > 1 and not is_text
            tokens += [Token("op", "{"), *inner, Token("op", "}")] if group else inner
            continue
        if kind == "cmd":
            part = SYNONYMS.get(part[1:], part)
            kind = "cmd" if part[0] == "\\" else "op"
            if kind == "cmd" and part[1:] in IGNORED:
                continue
        elif kind == "word":
            # Words of \text ignore case. One letter is a unit there, \text{m}, else an unknown
            part = WORDS.get(part.lower() if in_text else part, part)
            kind = "cmd" if part[0] == "\\" else "sym" if len(part) == 1 and not in_text else "word"
        elif kind == "space" or (part == "." and in_text and tokens and tokens[-1].kind == "word"):
            continue  # the dot of "sq. ft."
        tokens.append(Token("op" if part in ("or", "and") else kind, part, in_text))
    if len(tokens) > MAX_TOKENS:
        raise TooBig("too many tokens")
    return tokens


def plain_scripts(text: str, mark: str, table: dict[str, str]) -> str:
    """Runs of raised (mark ^) or lowered (mark _) characters as x^{12}."""
    run = f"[{''.join(table)}]+"
    return re.sub(run, lambda m: f"{mark}{{{''.join(map(table.get, m[0]))}}}", text)


def variants(text: str) -> Iterable[str]:
    """The ways to read a text: 48,625 as a number or a list, 2e-1 as 0.2 or as 2e minus 1."""
    if not text.isascii():
        for mark, table in SCRIPTS.items():
            text = plain_scripts(text, mark, table)
    text = text.translate(UNICODE)
    if not text.isascii():
        raise Unreadable("a character that is not known")
    # \left. is an invisible bracket; its dot is not a decimal point
    text = re.sub(r"\\(?:left|right)\s*\.", "", text).removesuffix(".")  # the end of a sentence
    text = GROUPED.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    text = PRIME.sub(lambda m: "'" * (m[0].count("\\prime") + m[0].count("'")), text)
    text = DEGREE.sub("@", text)
    readings = [text]
    if not re.search(r"[(\[]|\\\{", text):  # (3,140,625) is a triple
        readings.append(COMMAS.sub(lambda m: m[0].replace(",", ""), text))
    readings.append(re.sub(r"(?<![.\d])(\d+)[eE]([+-]?\d)", r"\1 e \2", text))
    return dict.fromkeys(readings)


# --- Tokens to values -----------------------------------------------------------------------------

# A row holds the spellings of one unit. Units are never converted: 1 m is not 100 cm
UNIT_ROWS = """
mm millimeter millimeters; cm centimeter centimeters centimetre centimetres; km kilometer kilometers
kilometre kilometres; m meter meters metre metres; in inch inches; ft foot feet; yd yard yards
mi mile miles; mph; mg milligram milligrams; g gram grams; kg kilogram kilograms
lb lbs pound pounds; oz ounce ounces; ton tons; ms millisecond milliseconds; s sec second seconds
min minute minutes
h hr hrs hour hours; day days; week weeks; month months; yr year years; mL ml milliliter milliliters
L l liter liters litre litres; gal gallon gallons; N newton newtons; J joule joules; W watt watts
V volt volts; A amp amps ampere amperes; Hz hertz; Pa pascal pascals; eV; mol mole moles; K kelvin
C celsius; F fahrenheit; degree degrees deg; rad radian radians; dollar dollars usd; cent cents
euro euros; yen; sterling; unit units; person people; student students; child children; boy boys
girl girls; team teams; way ways; time times; point points; coin coins; apple apples; marble marbles
ball balls; book books; card cards; game games; integer integers; number numbers; digit digits
solution solutions; triangle triangles; squares; edge edges; piece pieces; step steps; page pages
ticket tickets; pair pairs
"""
UNITS = {
    word: row.split()[0] for row in UNIT_ROWS.replace("\n", ";").split(";") for word in row.split()
}
# The numbers are exponents of the unit that follows: square meters
UNITS |= {"percent": "%", "per": "/", "square": 2, "sq": 2, "cubic": 3, "cu": 3}
BARE_UNITS = {"mm", "cm", "km", "ft", "kg", "lb"}  # units of two letters that count outside \text
CURRENCY = {"\\$": "dollar", "\\euro": "euro", "\\pounds": "sterling", "\\yen": "yen"}
CLOSING = {"(": ")", "[": "]", "{": "}", "\\langle": "\\rangle"}
CONSTANTS = {"e": E, "i": I, "\\pi": PI}
RELATIONS = ("=", "!=", "<", ">", "<=", ">=", "\\in")
ACCENTS = "vec hat bar tilde dot ddot overline overrightarrow widehat angle triangle".split()
DERIVATIVE = re.compile(r"(?:d|\\partial)(?:\^\d)?[A-Za-z\\].*")


def exact(digits: str) -> Fraction:
    """12, 1.50, .5, 1e-8 -> Fraction."""
    mantissa, _, exponent = digits.lower().partition("e")
    whole, _, decimals = mantissa.partition(".")
    if len(exponent) > 6 or abs(int(exponent or 0)) > MAX_EXPONENT:
        raise TooBig("an exponent above 5000")
    return int(whole + decimals or 0) * Fraction(10) ** (int(exponent or 0) - len(decimals))


def based(digits: str, base: str) -> Num | Based:
    """312_5; base ten is an ordinary number."""
    if not re.fullmatch(r"\d+ ([2-9]|[12]\d|3[0-6])", f"{digits} {base}", re.ASCII):
        raise Unreadable("a subscript on a number that is not a base")
    if max(map(int, digits)) >= int(base):  # letters as digits are not supported
        raise Unreadable("a digit that the base does not have")
    return Num(exact(digits)) if base == "10" else Based(int(digits, int(base)), int(base))


def unit_word(token: Token) -> str:
    """Hours, but not N for n: short units keep their case."""
    return token.text if len(token.text) < 3 else token.text.lower()


class Parser:
    """Recursive descent. From loose to tight: items, item (a chain of relations), side (a union, a
    ratio, an expression with a unit), total, product, power, atom. Each method returns a value.
    """

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0
        self.bars = 0  # where it is not 0, a | closes something and does not start |x|
        self.signs: Sequence[bool] = ()  # the choices for plus-minus of this reading of an item
        self.signs_used = 0

    def peek(self, ahead: int = 0) -> Token:
        """The next token, or the one `ahead` of it."""
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else Token("end", "")

    def accept(self, *texts: str) -> str | None:
        """Consume the next token if it is one of `texts` -> its text or None."""
        token = self.peek()
        if token.text in texts and token.kind in ("op", "cmd"):
            self.at += 1
            return token.text
        return None

    def expect(self, *texts: str) -> str:
        """`accept`, but Unreadable if it is another token."""
        found = self.accept(*texts)
        if found is None:
            raise Unreadable(f"{' or '.join(texts)} is missing")
        return found

    def answer(self) -> Value:
        """All tokens as one value."""
        value = self.listed(spread=True)
        # A tail that is silently dropped lets 4\sqrt(2) pass for 4
        if self.peek().kind != "end":
            raise Unreadable(f"{self.peek().text!r} is not expected")
        return value

    def listed(self, spread: bool) -> Value:
        """One item, or a list of them."""
        found, separators = self.items(spread)
        if len(found) == 1 and not separators:
            return found[0]
        # "or" joins inequalities to one set, "and" intersects them; with a comma they are a list
        if separators in ({"or"}, {"and"}) and all(is_ray(item) for item in found):
            return functools.reduce(functools.partial(join_rays, *separators), found)
        return List(tuple(found))

    def items(self, spread: bool) -> tuple[list[Value], set[str]]:
        """Items and the set of their separators. With `spread` a plus-minus makes two of one."""
        found, separators = [], set()
        while True:
            found += self.spread() if spread else [self.item()]
            separator = self.accept(",", ";", "or", "and")
            if separator is None:
                return found, separators
            if separator in (",", ";"):
                self.accept("or", "and")  # 1, 2, and 3
            separators.add(separator)

    def spread(self) -> list[Value]:
        """An item once for each choice of its plus-minus signs; with minus-plus they are tied."""
        # Kept and put back, because a set in braces inside the item spreads signs of its own
        start, outer = self.at, (self.signs, self.signs_used)
        self.signs, self.signs_used = (), 0
        found = [self.item()]
        count, tied = self.signs_used, any(t.text == "\\mp" for t in self.tokens[start : self.at])
        # Each sign doubles the readings
        if count > 3:
            raise TooBig("too many plus-minus signs")
        # The item was read with the first choice, all False; now the others.
        others = list(itertools.product((False, True), repeat=count))[1:]
        for signs in [(True,) * count] if tied else others:
            self.signs, self.signs_used, self.at = signs, 0, start
            found.append(self.item())
        self.signs, self.signs_used = outer
        return found

    def item(self) -> Value:
        """A side, or a chain of sides with relations in between."""
        sides, ops = [self.side()], []
        while operator := self.accept(*RELATIONS):
            ops.append(operator)
            sides.append(self.side())
        return relate(ops, sides) if ops else sides[0]

    def side(self) -> Value:
        """Words, or a total with currency sign and unit, or a ratio, or sets with unions."""
        words = self.only_words()
        if words:
            return Text(words)
        minus = self.peek(1).text in CURRENCY and self.accept("-")
        currency = CURRENCY.get(self.accept(*CURRENCY))
        value = self.total()
        value = self.with_unit(negative(value) if minus else value, currency)
        if self.peek().text == ":" and isinstance(value, Expr) and not self.bars:
            parts = [value]
            while self.accept(":"):
                parts.append(number(self.total()))
            is_clock = bool(re.fullmatch("[0-5][0-9]", self.peek(-1).text))
            return Ratio(is_clock, tuple(parts))
        while operator := self.accept("\\cup", "\\cap", "\\setminus"):
            value = combine(operator, value, self.total())
        return value

    def only_words(self) -> str | None:
        """The words up to the next separator if there is nothing else, as in \\text{east}."""
        # Outside of \text one or two letters are a product of unknowns
        end = self.at
        while end < len(self.tokens) and (
            self.tokens[end].kind == "word"
            and (self.tokens[end].in_text or len(self.tokens[end].text) > 2)
        ):
            end += 1
        following = self.tokens[end].text if end < len(self.tokens) else ","
        if end == self.at or following not in (",", ";", "or", "and", ")", "\\}", "]", "}"):
            return None
        words = " ".join(token.text for token in self.tokens[self.at : end])
        self.at = end
        return words

    def with_unit(self, value: Value, currency: str | None) -> Value:
        """Attach the unit that follows. A degree sign outside of a function is a unit as well."""
        if not isinstance(value, Expr):
            return value
        unit = self.unit()
        if currency:
            # \$5 dollars is one unit twice, \$5 cents is not
            if unit not in (None, ((currency, 1),)):
                raise Unreadable("two units")
            unit = ((currency, 1),)
        if unit == DEGREES:  # the word is read as the sign
            value = Deg(value)
        return Unit(value, unit or DEGREES) if unit or has_degrees(value) else value

    def unit(self) -> UnitOf | None:
        """Percent sign or unit words -> "%", a sorted tuple of (unit, exponent), or None."""
        powers, sign, power = collections.Counter(), 1, 1
        while True:
            if self.accept("%"):
                return "%"
            if powers and self.accept("/"):
                sign = -1
            elif powers and self.accept("*"):
                sign = 1
            elif self.unit_ahead():
                unit = UNITS[unit_word(self.peek())]
                self.at += 1
                if unit == "%":
                    return "%"
                if unit == "/":
                    sign = -1
                elif type(unit) is int:
                    power = unit
                else:
                    powers[unit] += sign * power * self.unit_exponent()
                    power = 1
            else:
                break
        powers.pop("unit", None)  # "12 units" is as good as 12
        return tuple(sorted(powers.items())) or None

    def unit_exponent(self) -> int:
        """The integer after ^, or 1."""
        exponent = self.argument() if self.accept("^") else ONE
        if not isinstance(exponent, Num) or exponent.value.denominator != 1:
            raise Unreadable("an exponent of a unit that is not an integer")
        return int(exponent.value)

    def unit_ahead(self) -> bool:
        """Whether the next token is a unit; outside of \\text only if its name is long."""
        token = self.peek()
        # 5m in a formula is five times m, 5\text{ m} is a length
        long = token.in_text or len(token.text) > 2 or token.text in BARE_UNITS
        return token.kind == "word" and unit_word(token) in UNITS and long

    def sign(self, operator: str | None) -> bool:
        """Whether the sign is a minus; a plus-minus takes the choice of this reading."""
        if operator in ("+", "-", None):
            return operator == "-"
        # The first reading has no choices yet: it takes every upper sign and counts them
        minus = self.signs_used < len(self.signs) and self.signs[self.signs_used]
        self.signs_used += 1
        return minus != (operator == "\\mp")

    def total(self) -> Value:
        """Terms joined by signs."""
        terms, signs, operator = [], ("+", "-", "\\pm", "\\mp"), None
        while True:
            minus = self.sign(operator)
            while prefix := self.accept(*signs):
                minus ^= self.sign(prefix)
            term = self.product()
            terms.append(negative(term) if minus else term)
            operator = self.accept(*signs)
            if operator is None:
                break
        value = plus(*terms)
        infix = self.accept("\\over", "\\choose")  # of plain TeX: {a \over b}
        if infix is None:
            return value
        below = self.total()
        return over(value, below) if infix == "\\over" else Binom(number(value), number(below))

    def product(self) -> Value:
        """Factors joined by * or / or nothing."""
        factors = [self.power()]
        while (operator := self.accept("*", "/")) or self.factor_ahead(factors):
            minus = operator and self.accept("-")
            factor = self.power()
            # A matrix is the last factor: products of matrices are not supported
            if isinstance(factor, Matrix) and operator != "/":
                return scaled(times(*factors, MINUS_ONE if minus else ONE), factor)
            factor = number(negative(factor) if minus else factor)
            factors.append(Inv(factor) if operator == "/" else factor)
        # A single factor may be a set or a tuple, which `times` would refuse
        return times(*factors) if len(factors) > 1 else factors[0]

    def factor_ahead(self, factors: Sequence[Value]) -> bool:
        """Whether the next token starts a factor that is multiplied without a sign."""
        token = self.peek()
        if self.unit_ahead():
            return any(symbols(factor) for factor in factors)
        if token.kind == "num":  # (n-2) 2^n and 2^3 3^2, but neither x2 nor 71 72
            closed = self.peek(-1).text in (")", "]", "}")
            last = factors[-1]
            return isinstance(last, Pow) or (closed and not isinstance(last, Num))
        if token.kind == "cmd":
            return token.text in ATOMS or token.text in LETTERS
        opens = token.text in ("(", "[", "{") or (token.text == "|" and not self.bars)
        return token.kind in ("sym", "word") or opens

    def power(self) -> Value:
        """An atom with its exponent, factorial and degree sign."""
        base, raised = self.atom(), False
        while True:
            # n!! is the double factorial and not (n!)!: left unread, so that it is refused
            if self.peek().text == "!" and self.peek(1).text != "!":
                self.at += 1
                base = Factorial(number(base))
            elif self.accept("@"):
                base = Deg(number(base))
            # x^2^3 could be either order, and is an error in TeX
            elif not raised and self.accept("^"):
                base, raised = Pow(number(base), self.argument()), True
            else:
                return base

    def argument(self, one_digit: bool = False) -> Expr:
        """A TeX argument: a group or one token. \\frac59 takes one digit, but 2^10 the number."""
        token = self.peek()
        if (token.kind == "word" and not token.in_text) or (token.kind == "num" and one_digit):
            self.split(token)
        if self.peek().kind == "num":
            self.at += 1
            return Num(exact(self.peek(-1).text))
        if self.accept("-"):
            return negative(self.argument(one_digit))
        return number(self.atom())

    def split(self, token: Token) -> None:
        """Replace the next token, a run of letters or digits, by single ones."""
        if token.text.isalnum():  # not 1.5
            kind = "sym" if token.kind == "word" else "num"
            self.tokens[self.at : self.at + 1] = [Token(kind, char) for char in token.text]

    def raw(self) -> str:
        """The text of a TeX argument that is only a name: a subscript, what is under an accent."""
        start, depth = self.at, 0  # depth of the braces
        while self.at == start or depth > 0:
            if self.peek().kind == "end":
                raise Unreadable("an argument is missing")
            depth += {"{": 1, "}": -1}.get(self.peek().text, 0)
            self.at += 1
        return "".join(t.text for t in self.tokens[start : self.at] if t.text not in "{}")

    def atom(self) -> Value:
        """The tightest level: a number, a name, a bracket or a command."""
        token = self.peek()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooBig("nested too deeply")
        if token.kind == "num":
            value = self.numeral()
        elif token.kind in ("sym", "word") or token.text in LETTERS:
            value = self.symbol()
        elif token.text in CLOSING:
            value = self.group()
        elif token.text in ATOMS:
            self.at += 1
            value = ATOMS[token.text](self)
        else:
            raise Unreadable(f"{token.text!r} where a value should start")
        self.depth -= 1
        return value

    def numeral(self) -> Num | Based:
        """Digits: a plain, repeating, based or mixed number."""
        digits, following = self.peek().text, self.peek(1).text
        self.at += 1
        if "." in digits and following in ("\\overline", "\\bar", "\\dot"):
            self.at += 1
            period = self.raw()
            if not re.fullmatch(r"\d{1,200}", period, re.ASCII):
                raise Unreadable("a repeating part that is not digits")
            # A period p of k digits is p / (10^k - 1), shifted by the decimals before it
            repeated = Fraction(int(period), 10 ** len(period) - 1)
            return Num(exact(digits) + repeated / 10 ** len(digits.split(".")[1]))
        if self.accept("_"):
            return based(digits, self.raw())
        # 0.(3) would be read as 0 times 3
        if digits.endswith(".") and following == "(":
            raise Unreadable("a decimal point before a bracket")
        # 1\frac{4}{5} is a sum, while 1\frac{x}{5} is a product
        value = exact(digits)
        return Num(value + self.mixed_part() if digits.isdigit() else value)

    def mixed_part(self) -> Fraction | int:
        """The fraction of a mixed number, 1\\frac{4}{5} or 1 4/5, else 0."""
        start, part = self.at, None
        if self.accept("\\frac"):
            part = self.fraction()
        elif self.peek().kind == self.peek(2).kind == "num" and self.peek(1).text == "/":
            part = over(Num(exact(self.peek().text)), Num(exact(self.peek(2).text)))
            self.at += 3
        # Only a proper fraction makes a mixed number: 3\frac{5}{2} is a product
        match part:
            case Mul((Num(above), Inv(Num(below)))):
                if 0 < above < below and above.denominator == below.denominator == 1:
                    return above / below
        self.at = start
        return 0

    def symbol(self) -> Expr:
        """A name with its subscripts and primes, or a function value such as f(x)."""
        token = self.peek()
        if token.kind == "word" and not token.in_text and len(token.text) < 4:
            self.split(token)  # mn is a product, but a longer word is one name
        self.at += 1
        return self.name(self.peek(-1).text)

    def name(self, name: str) -> Expr:
        """Subscripts, primes and arguments of a name that has been read."""
        while mark := self.accept("_", "'"):
            name += "_" + self.raw() if mark == "_" else "'"
        if name in CONSTANTS:  # after the subscripts and primes, since i_1 and e' are names
            return CONSTANTS[name]
        # f(...) is a function value, another letter only before one token: n(n+1) is a product
        called = name[0] in "fghFGH" or "'" in name
        called |= self.peek(1).kind in ("num", "sym") and self.peek(2).text == ")"
        if called and self.accept("("):
            arguments, _ = self.items(spread=False)
            self.expect(")")
            return App(name, tuple(map(number, arguments)))
        return Sym(name)

    def group(self) -> Value:
        """Brackets: grouping, a tuple or an interval. TeX braces are invisible."""
        start, opening = self.at, self.peek().text
        self.at += 1
        # Inside of a bracket a | opens an absolute value again
        bars, self.bars = self.bars, 0
        found, separators = self.items(spread=False)
        self.bars = bars
        if separators and opening != "{":
            # A half-open interval closes with another bracket than it opens with
            closing = self.expect(")", "]", "\\rangle")
            return Tuple(opening + closing, tuple(found))
        self.expect(CLOSING[opening])
        if separators:
            return List(tuple(found))
        if opening == "(" and self.at == start + 3 and self.accept("_"):
            return based(self.tokens[start + 1].text, self.raw())
        return found[0]

    # The methods of the table ATOMS: each is entered with the token of its command consumed.

    def fraction(self) -> Expr:
        """\\frac{a}{b}, \\frac59, \\frac9{19}"""
        start = self.at
        above = self.argument(one_digit=True)
        middle = self.at
        below = self.argument(one_digit=True)
        cuts = (self.tokens[start:middle], self.tokens[middle : self.at])
        texts = ["".join(t.text for t in cut if t.text not in "{}") for cut in cuts]
        if all(map(DERIVATIVE.fullmatch, texts)):  # dx/dt is a name, not x/t
            return Sym("/".join(texts))
        return over(above, below)

    def root(self) -> Pow:
        """\\sqrt{x}, \\sqrt[3]{x}"""
        index = Num(Fraction(2))
        if self.accept("["):
            index = number(self.total())
            self.expect("]")
        return Pow(self.argument(), over(ONE, index))

    def binomial(self) -> Binom:
        """\\binom{n}{k}, \\binom nk"""
        return Binom(self.argument(one_digit=True), self.argument(one_digit=True))

    def braces(self) -> Set | Reals:
        """A set: its elements, or one inequality as in {x | x > 2}."""
        if self.accept("\\}"):
            return Set(())
        bars, self.bars = self.bars, 1  # in here | starts no absolute value and : no ratio
        found, _ = self.items(spread=True)
        value = Set(tuple(found))
        if self.accept("|", ":"):
            condition = self.listed(spread=True)
            # {x | x > 2} and {x \in R | x > 2}
            name = found[0].name if isinstance(found[0], Named) else found[0]
            if not is_ray(condition) or condition.name != name:
                raise Unreadable("a set that is not given by one inequality")
            value = condition.value
        self.expect("\\}")
        self.bars = bars
        return value

    def floor(self) -> Expr:
        """\\lfloor x \\rfloor, \\lceil x \\rceil"""
        up = self.peek(-1).text == "\\lceil"
        sign = MINUS_ONE if up else ONE  # the ceiling of x is minus the floor of -x
        inner = times(sign, self.total())
        self.expect("\\rceil" if up else "\\rfloor")
        return times(sign, Floor(inner))

    def absolute(self) -> Abs:
        """|x|"""
        self.bars += 1
        value = Abs(number(self.total()))
        self.bars -= 1
        self.expect("|")
        return value

    def function(self) -> Expr:
        """\\sin x, \\sin^2 x, \\sin^{-1} x, \\log_2 x, with or without brackets."""
        name = FUNCTIONS[self.peek(-1).text[1:]]
        base = self.argument() if name == "ln" and self.accept("_") else None
        exponent = self.argument() if self.accept("^") else None
        inner = self.function_argument()
        if name == "exp":
            value = Pow(E, inner)
        elif name == "lg" or base:
            value = over(Fn("ln", inner), Fn("ln", base or Num(Fraction(10))))
        else:
            value = Fn(name, inner)
        # \sin^{-1} x is the inverse; with other functions it may be either, and is refused
        if exponent == MINUS_ONE:
            if name not in ("sin", "cos", "tan"):
                raise Unreadable("an inverse function or a reciprocal")
            return Fn(f"a{name}", inner)
        return Pow(value, exponent) if exponent else value

    def function_argument(self) -> Expr:
        """A bracket, or the factors up to the next operator, function or bracket."""
        sign, stops = MINUS_ONE if self.accept("-") else ONE, ("(", "[", "{", "|")
        if self.peek().text in stops:
            return times(sign, self.atom())
        factors = [number(self.power())]
        # \sin 2x e^x is (sin 2x) e^x, and \sin x \cos x is a product
        while self.factor_ahead(factors) and self.peek().text not in (*stops, "e"):
            if self.peek().text[1:] in FUNCTIONS:
                break
            factors.append(number(self.power()))
        return times(sign, *factors)

    def accent(self) -> Expr:
        """\\vec{v}, \\dot{x}_0, \\overline{AB}, \\angle ABC: a name."""
        name = self.peek(-1).text
        if name in ("\\angle", "\\triangle") and self.peek().text != "{":
            while self.peek().kind in ("sym", "word"):
                name += self.peek().text
                self.at += 1
                name += "_" + self.raw() if self.accept("_") else ""
        else:
            name += "{" + self.raw() + "}"
        return self.name(name)

    def number_set(self) -> Reals | Sym:
        """\\mathbb{R} is an interval; the other sets are only names."""
        name = self.raw()
        line = Interval(Inf(-1), False, Inf(1), False)
        return Reals((line,)) if name == "R" else Sym(f"\\mathbb{name}")

    def matrix(self) -> Matrix:
        """\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"""
        kind = self.raw()
        if kind not in ("pmatrix", "bmatrix", "matrix", "smallmatrix", "array"):
            raise Unreadable(f"the environment {kind}")
        if kind == "array":
            self.raw()
        rows = [[]]
        while True:
            rows[-1].append(number(self.total()))
            if self.accept("&"):
                continue
            if self.accept("\\\\") and self.peek().text != "\\end":
                rows.append([])
                continue
            self.expect("\\end")
            if self.raw() != kind or len(set(map(len, rows))) != 1:
                raise Unreadable("a matrix with rows of different lengths")
            return Matrix(tuple(map(tuple, rows)))


ATOMS: dict[str, Callable[[Parser], Value]] = {
    "\\frac": Parser.fraction,
    "\\sqrt": Parser.root,
    "\\binom": Parser.binomial,
    "|": Parser.absolute,
    "\\{": Parser.braces,
    "\\lfloor": Parser.floor,
    "\\lceil": Parser.floor,
    "\\infty": lambda parser: Inf(1),
    "\\pi": lambda parser: PI,
    "\\emptyset": lambda parser: Set(()),
    "\\mathbb": Parser.number_set,
    "\\begin": Parser.matrix,
    **dict.fromkeys([f"\\{name}" for name in FUNCTIONS], Parser.function),
    **dict.fromkeys([f"\\{name}" for name in ACCENTS], Parser.accent),
}


def read(text: str) -> list[Value]:
    """All readings of a text; if there is none, the Unreadable or TooBig of the first attempt."""
    readings, problem = [], None
    for variant in variants(text):
        try:
            readings.append(Parser(tokenize(variant)).answer())
        except (Unreadable, TooBig) as error:
            problem = problem or error
    if not readings:
        raise problem
    return readings
