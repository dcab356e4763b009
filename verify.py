"""Grade a response against a label: text in, a verdict with a reason out.

The verifier is the reward. What it wrongly accepts is what the policy learns, what it cannot finish is
what ends a run. So nothing here evaluates Python, nothing simplifies symbolically, and nothing is equal
"up to a tolerance": answers go through a small LaTeX parser into typed values which are compared exactly.

    extraction   text after the last </think>, last box, all boxes there must agree
    parser       LaTeX or plain text -> expressions (tuples) and values (dataclasses)
    evaluation   expressions -> Fractions, or mpmath numbers of known precision, under a work budget
    comparison   typed: number, list, tuple, real set, matrix, relation, ratio, based number, text
    pool         Verifier: exec'd worker processes with a hard kill, for use in a trainer

    python verify.py --cases FILE.jsonl       one JSON verdict per {"response", "label"} line
    python verify.py --audit FILE.jsonl       what a label file will do, before training on it
    python verify.py RESPONSE LABEL           one verdict, explained in words
"""

import argparse
import collections
import ctypes
import functools
import hashlib
import json
import math
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import mpmath

REASONS = {
    "ok": "the answer equals the label",
    "wrong": "the answer was understood and differs from the label",
    "no_think_end": "the thinking part never ends, so there is no final answer",
    "no_box": "there is no \\boxed{...} after the thinking part",
    "empty": "the box or the label is empty",
    "unbalanced": "the braces of a box do not close",
    "hedge": "several boxes after the thinking part do not have the same value",
    "parse": "the answer or the label could not be read as a value, and the texts differ",
    "too_big": "the answer is too long, too deep or too large to evaluate",
    "timeout": "grading took longer than the time limit and was killed",
    "died": "the grader failed on this pair, which is a fault of the verifier itself",
}
UNDECIDED = ("parse", "too_big", "timeout", "died")  # a rising share of these is a sick verifier

MAX_BOX = 4000  # characters
MAX_TOKENS = 1200
MAX_DEPTH = 60
MAX_POWER_BITS = 1 << 20  # 2024^{4046} has 44,438 bits
MAX_EXPONENT = 5000  # of 1e5000
MAX_FACTORIAL, MAX_BINOMIAL = 3000, 5000
MAX_SYMBOLS = 12
MAX_BOXES = 8  # different texts in the boxes of one response
MAX_BITS = 8192  # precision up to which two constants are told apart
BUDGET_NS = 150_000_000  # estimated, not measured: the same pair always gets the same verdict


class Verdict(NamedTuple):
    """`correct`, the `reason` (a key of REASONS) and the text of the graded box or None."""

    correct: bool
    reason: str
    answer: str | None


class Extraction(NamedTuple):
    """The last box (`answer`), `status` "ok" or a reason, and the other boxes' texts."""

    answer: str | None
    status: str
    others: tuple = ()


class Unreadable(ValueError):
    """The text is not an answer of a supported kind, or has no defined value."""


class NoValue(Unreadable):
    """Understood, but it has no value: 18 = 19, 1/0. Reason "wrong", not "parse"."""


class TooBig(ValueError):
    """A size cap or the work budget is exceeded."""


# ---------------------------------------------------------------------------------------------------
# Extraction

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:\{|\Z)")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def final_part(response, think):
    """The text to grade, or None when the thinking part has no end (`think`: auto, require, none)."""
    if think not in ("auto", "require", "none"):
        raise ValueError(f"think must be auto, require or none, not {think!r}")
    if think == "none":
        return response
    end = response.rfind("</think>")
    if response.rfind("<think>") > end or (think == "require" and end < 0):
        return None
    return response[end + len("</think>") :] if end >= 0 else response


def closing_brace(text, start):
    """Index of the brace that closes the one before `start`; escaped braces do not count."""
    depth = 1
    for match in BRACE.finditer(text, start, start + MAX_BOX + 1):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise TooBig if len(text) > start + MAX_BOX else Unreadable


def extract(response, think="auto"):
    """Find the answer: the last box of the final part, with all other boxes there -> Extraction."""
    final = final_part(response, think)
    if final is None:
        return Extraction(None, "no_think_end")
    texts = {}  # an ordered set, last box first
    for start in reversed([match.end() for match in BOX.finditer(final)]):
        try:
            texts[clean(final[start : closing_brace(final, start)])] = None
        except TooBig:
            return Extraction(None, "too_big")
        except Unreadable:
            return Extraction(None, "unbalanced")
        if len(texts) > MAX_BOXES:
            break
    if not texts:
        return Extraction(None, "no_box")
    answer, *others = texts
    return Extraction(answer, "ok" if answer else "empty", tuple(others))


def clean(text):
    """Strip white space, dollar signs around the whole text, and boxes around the whole text."""
    for _ in range(6):
        before, text = text, text.strip()
        if len(text) > 1 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
            text = text[1:-1]
        box = BOX.match(text)
        if box and len(text) <= 2 * MAX_BOX:
            try:
                if closing_brace(text, box.end()) == len(text) - 1:
                    text = text[box.end() : -1]
            except (TooBig, Unreadable):
                return text
        if text == before:
            break
    return text


# ---------------------------------------------------------------------------------------------------
# Tokens


class Token(NamedTuple):
    """`kind`: num, sym (one letter), word, cmd or op. `in_text`: inside \\text{...} or the like."""

    kind: str
    text: str
    start: int
    end: int
    in_text: bool = False


GREEK = dict(zip("αβγδεζηθικλμνξρστυφχψω", (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon "
    "phi chi psi omega").split()))  # fmt: skip
CAPITALS = dict(zip("ΓΔΘΛΞΠΣΦΨΩ", "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega".split()))
LETTERS = {"\\" + name for name in [*GREEK.values(), *CAPITALS.values(), "hbar", "ell"]}
# A fixed list and no NFKC, which would turn 5² into 52. Every other non-ASCII character is refused.
UNICODE = str.maketrans({
    **{char: f"\\{name} " for char, name in (GREEK | CAPITALS).items()},
    "π": "\\pi ", "−": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "∙": "\\cdot ", "÷": "/",
    "√": "\\sqrt ", "∛": "\\sqrt[3]", "°": "^\\circ ", "∞": "\\infty ", "±": "\\pm ", "∓": "\\mp ",
    "≤": "\\le ", "≥": "\\ge ", "⩽": "\\le ", "⩾": "\\ge ", "≠": "\\ne ", "∪": "\\cup ", "∈": "\\in ",
    "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ",
    "⌉": "\\rceil ", "′": "'", "’": "'", "″": "''", "∠": "\\angle ", "¼": "\\frac14 ", "½": "\\frac12 ",
    "¾": "\\frac34 ", "⅓": "\\frac13 ", "⅔": "\\frac23 ", "€": "\\euro ", "£": "\\pound ", "¥": "\\yen ",
    "∩": "\\cap ", "∖": "\\setminus ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2002": " ",
})  # fmt: skip
SCRIPTS = {"^": dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")), "_": dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789"))}
# Digit groups that can only be one number: 48{,}625  48,\!625  48\,625  48 625
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(\{,\}|,\\!\s*|\\[,;:! ]|~| )\d{3})(?:\1\d{3})*(?!\1?\d)", re.A)
PRIME = re.compile(r"\^\s*(?:\\prime|\{\s*((?:(?:\\prime|')\s*)+)\})")
DEGREE = re.compile(r"(?:\{\s*\})?\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree")
TOKEN = re.compile(
    r"(?P<num>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+(?![\d.]))?)|(?P<cmd>\\(?:[A-Za-z]+|.|\Z))|(?P<word>[A-Za-z]+)"
    r"|(?P<op>[<>]=|[-+*/^_=<>()\[\]{}|,;:!'%.&@])|(?P<space>[\s$~]+)",
    re.ASCII | re.DOTALL,
)
TEXT_MACROS = set("text mbox textbf textit textrm textsf texttt emph mathrm mathbf mathit mathsf mathtt "
                  "operatorname boldsymbol bm bf rm underline mathcal".split())  # fmt: skip
IGNORED = set("left right displaystyle textstyle limits quad qquad big Big bigl bigr Bigl Bigr bigg Bigg "
              "biggl biggr Biggl Biggr , ; : ! ( ) [ ]".split()) | {" ", "\n", ""}  # fmt: skip
FUNCTIONS = set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp".split())
SYNONYMS = {
    "times": "*", "cdot": "*", "ast": "*", "div": "/", "dfrac": "\\frac", "tfrac": "\\frac", "cfrac": "\\frac",
    "dbinom": "\\binom", "tbinom": "\\binom", "leq": "<=", "le": "<=", "leqslant": "<=", "geq": ">=",
    "ge": ">=", "geqslant": ">=", "lt": "<", "gt": ">", "neq": "!=", "ne": "!=", "lbrace": "\\{", "rbrace": "\\}",
    "lbrack": "[", "rbrack": "]", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "%": "%", "lor": "or",
    "vee": "or", "land": "and", "wedge": "and", "asin": "\\arcsin", "acos": "\\arccos", "atan": "\\arctan",
    "varphi": "\\phi", "varepsilon": "\\epsilon", "vartheta": "\\theta", "varnothing": "\\emptyset",
    "textdollar": "\\$", "textdegree": "@", "backslash": "\\setminus", "infin": "\\infty", "colon": ":",
}  # fmt: skip
WORDS = {name: "\\" + name for name in FUNCTIONS} | {
    "sqrt": "\\sqrt", "pi": "\\pi", "oo": "\\infty", "inf": "\\infty", "infty": "\\infty",
    "infinity": "\\infty", "or": "or", "and": "and", "asin": "\\arcsin", "acos": "\\arccos", "atan": "\\arctan",
}  # fmt: skip


def plain_ascii(text):
    """Map the known Unicode characters to LaTeX; runs of superscripts become one power."""
    if text.isascii():
        return text
    for mark, table in SCRIPTS.items():
        run = re.compile(f"[{''.join(table)}]+")
        text = run.sub(lambda m, k=mark, t=table: k + "{" + "".join(t[c] for c in m[0]) + "}", text)
    text = text.translate(UNICODE)
    if not text.isascii():
        raise Unreadable("a character that is not known")
    return text


def tokenize(text, scientific=True):
    """Text -> list of Token. With `scientific` 2e3 is one number, else 2 times e times 3."""
    text = plain_ascii(text)
    text = GROUPED.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    text = PRIME.sub(lambda m: "'" * (m[0].count("\\prime") + m[0].count("'")), text)
    text = DEGREE.sub("@", text)
    tokens, braces, at = [], [], 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise Unreadable(f"the character {text[at]!r}")
        kind, part, start, at = match.lastgroup, match[0], at, match.end()
        if kind == "space":
            continue
        name = part[1:] if kind == "cmd" else part
        if kind == "num" and not scientific and (cut := re.search("[eE]", part)):
            at = start + cut.start()
            part = text[start:at]
        if kind == "cmd" and (name in TEXT_MACROS or name in IGNORED):
            opening = re.compile(r"\s*\{").match(text, at) if name in TEXT_MACROS else None
            if opening:
                at = opening.end()
                # \mathbf{x+1}^2 must stay a group, \text{cm}^2 must not become one
                simple = re.compile(r"[A-Za-z\s~.\d]*\}|").match(text, at)[0]
                braces.append("hidden" if simple or name.startswith(("text", "mbox")) else "shown")
                if braces[-1] == "shown":
                    tokens.append(Token("op", "{", start, at, True))
            continue
        if part == "{":
            braces.append("math")
        elif part == "}":
            if not braces:
                raise Unreadable("a closing brace without an opening one")
            if braces.pop() == "hidden":
                continue
        in_text = "hidden" in braces or "shown" in braces
        if kind == "cmd":
            part = SYNONYMS.get(name, part)
        elif kind == "word":
            part = WORDS.get(part.lower() if in_text else part, part)
            kind = "cmd" if part.startswith("\\") else kind
            if len(part) == 1 and not in_text:
                kind = "sym"
        if part in ("or", "and"):
            kind = "op"
        tokens.append(Token(kind, part, start, at, in_text))
    if braces:
        raise Unreadable("an opening brace without a closing one")
    while tokens and tokens[-1].text == ".":
        tokens.pop()
    if len(tokens) > MAX_TOKENS:
        raise TooBig("too many tokens")
    return tokens


def join_thousands(tokens):
    """Join 48 , 625 outside of brackets into one number: the second reading of an ambiguous text."""
    out, depth, at = [], 0, 0
    while at < len(tokens):
        depth += {"(": 1, "[": 1, "\\{": 1, ")": -1, "]": -1, "\\}": -1}.get(tokens[at].text, 0)
        end, run = at, [tokens[at]]
        while end + 2 < len(tokens) and tokens[end + 1].text == "," and tokens[end + 2].kind == "num":
            if tokens[end].end != tokens[end + 1].start or tokens[end + 1].end != tokens[end + 2].start:
                break
            end += 2
            run.append(tokens[end])
        text = ",".join(token.text for token in run)
        if depth == 0 and re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+(\.\d*)?", text, re.ASCII):
            out.append(Token("num", text.replace(",", ""), tokens[at].start, tokens[end].end))
        else:
            out.extend(tokens[at : end + 1])
        at = end + 1
    return out


# ---------------------------------------------------------------------------------------------------
# Values. An expression is a nested tuple: ("num", Fraction), ("sym", name), ("const", name),
# ("+", a, b, ...), ("*", a, ("inv", b), ...), ("neg", a), ("^", a, b), ("fn", name, a), ("deg", a),
# ("log", a, base), ("app", name, a, ...), ("!", a), ("!!", a), ("binom", a, b), ("abs" | "floor" | "ceil", a).


@dataclass(frozen=True)
class Number:
    """An expression with an optional unit: "%" or a sorted tuple of (unit, exponent)."""

    expr: tuple
    unit: object = None


@dataclass(frozen=True)
class Based:
    """A number written in another base than ten; compared as written."""

    value: int
    base: int


@dataclass(frozen=True)
class Items:
    """Unordered: a bare list, or {...} when `braced`."""

    items: tuple
    braced: bool = False


@dataclass(frozen=True)
class Group:
    """Ordered: a tuple, a vector or an interval with its two brackets."""

    opening: str
    items: tuple
    closing: str


@dataclass(frozen=True)
class Reals:
    """Union of intervals (low, closed, high, closed); `joint` holds the parts that have no order."""

    pieces: tuple


@dataclass(frozen=True)
class Matrix:
    """Rows of expressions."""

    rows: tuple


@dataclass(frozen=True)
class Ratio:
    """a : b : c, or a time of day if the last part looks like minutes (`clock`)."""

    parts: tuple
    clock: bool


@dataclass(frozen=True)
class Text:
    """Words."""

    words: str


@dataclass(frozen=True)
class Named:
    """`name = value` (or name in set). `strict`: the left side is one name, so a label may drop it."""

    name: object
    value: object
    strict: bool


@dataclass(frozen=True)
class Relation:
    """`left op right`, op one of = != < <=."""

    op: str
    left: tuple
    right: tuple


UNIT_ROWS = """
mm millimeter millimeters millimetre millimetres; cm centimeter centimeters centimetre centimetres
m meter meters metre metres; km kilometer kilometers kilometre kilometres; inch in inches; ft foot feet
yard yards yd; mile miles mi; mg milligram milligrams; g gram grams; kg kilogram kilograms; lb lbs pound pounds
oz ounce ounces; ton tons tonne tonnes; s sec second seconds; min minute minutes; hour hours h hr hrs
day days; week weeks; month months; year years yr yrs; ms millisecond milliseconds
ml milliliter milliliters millilitre millilitres; l liter liters litre litres; gallon gallons; cup cups
dollar dollars usd; cent cents; euro euros; yen; degree degrees deg; rad radian radians; mph
n newton newtons; j joule joules; kj kilojoule kilojoules; w watt watts; kw kilowatt kilowatts; v volt volts
a amp amps ampere amperes; hz hertz; pa pascal pascals; k kelvin kelvins; c celsius; f fahrenheit
mol mole moles; ev; person people; student students; way ways; time times; point points; coin coins
apple apples; marble marbles; ball balls; book books; block blocks; card cards; game games; side sides
child children; boy boys; girl girls; number numbers; integer integers; solution solutions; triangle triangles
square squares; piece pieces; step steps; page pages; ticket tickets; edge edges; vertex vertices; digit digits
pair pairs; triple triples; word words; letter letters; player players; team teams; unit units
"""
UNITS = {word: row.split()[0] for row in re.split(r"[;\n]", UNIT_ROWS) for word in row.split()}
BARE_UNITS = {"mm", "cm", "km", "ft", "kg", "lb"}  # two-letter units that count outside of \text
POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
CURRENCY = {"\\$": "dollar", "\\euro": "euro", "\\pound": "sterling", "\\pounds": "sterling", "\\yen": "yen"}
CLOSING = {"(": ")", "[": "]", "\\{": "\\}", "\\langle": "\\rangle", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
RELATIONS = ("=", "!=", "<", ">", "<=", ">=", "\\in")
ACCENTS = {f"\\{name}" for name in
           "vec hat bar tilde dot ddot overline overrightarrow widehat widetilde".split()}  # fmt: skip
SHAPES = {"\\angle", "\\measuredangle", "\\triangle"}
MATRICES = {"pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix", "array"}
CONSTANTS = {"e": ("const", "e"), "i": ("const", "i"), "\\pi": ("const", "pi")}
MINUS_ONE = ("num", Fraction(-1))
INFINITY = ("inf",)
DERIVATIVE = re.compile(r"(?:d|\\partial)(?:\^\{?\d\}?)?[A-Za-z\\].*")


def scalar(value):
    """The expression of a plain number; anything else cannot take part in arithmetic."""
    if type(value) is tuple:
        return value
    if isinstance(value, Number) and value.unit is None:
        return value.expr
    raise Unreadable("arithmetic on something that is not a number")


class Parser:
    """Recursive descent over tokens. The methods, from loose to tight binding: answer, items, item (a
    chain of relations), side (with unit, ratio, union), total, product, power, atom."""

    def __init__(self, tokens):
        self.tokens, self.at, self.depth, self.bars = tokens, 0, 0, 0
        self.signs, self.signs_used, self.currency = (), 0, None

    def peek(self, ahead=0):
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else Token("end", "", -1, -1)

    def accept(self, *texts):
        """Consume the next token if it is one of `texts`, and return its text."""
        token = self.peek()
        if token.text in texts and token.kind in ("op", "cmd"):
            self.at += 1
            return token.text
        return None

    def expect(self, *texts):
        found = self.accept(*texts)
        if found is None:
            raise Unreadable(f"{' or '.join(texts)} is missing")
        return found

    def deeper(self):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooBig("nested too deeply")

    def answer(self):
        value = self.items(spread=True)
        if self.peek().kind != "end":
            raise Unreadable(f"{self.peek().text!r} is not expected")
        return value

    def items(self, spread):
        """One item, or a list. With `spread` a plus-minus in an item makes two items of it."""
        found, separators = [], []
        while True:
            found.extend(self.spread_item() if spread else [self.item()])
            separator = self.accept(",", ";", "or", "and")
            if separator is None:
                break
            separators.append(separator)
            if separator in (",", ";"):
                self.accept("or", "and")
        if len(found) == 1 and not separators:
            return found[0]
        if spread and set(separators) in ({"or"}, {"and"}) and all(map(is_ray, found)):
            return functools.reduce(functools.partial(combine_rays, separators[0]), found)
        return Items(tuple(found)) if spread else tuple(found)

    def spread_item(self):
        """The item once for each choice of its plus-minus signs (minus-plus is the opposite of one)."""
        start, depth, outer = self.at, self.depth, (self.signs, self.signs_used)
        self.signs, self.signs_used = (), 0
        found = [self.item()]
        count, end = self.signs_used, self.at
        if count > 3:
            raise TooBig("too many plus-minus signs")
        tied = any(token.text == "\\mp" for token in self.tokens[start:end])
        for choice in range(1, 2 if tied and count else 2**count):
            self.at, self.depth, self.signs_used = start, depth, 0
            self.signs = (True,) * count if tied else tuple(choice >> k & 1 for k in range(count))
            found.append(self.item())
        self.signs, self.signs_used = outer
        return found

    def plus_minus(self, token):
        minus = self.signs_used < len(self.signs) and self.signs[self.signs_used]
        self.signs_used += 1
        return bool(minus) != (token == "\\mp")

    def item(self):
        """A side, or a chain of sides with relations in between."""
        start, state = self.at, (self.depth, self.bars, self.signs_used)
        try:
            sides = [self.side()]
        except NoValue:
            raise
        except Unreadable:
            self.depth, self.bars, self.signs_used = state
            sides = [self.odd_name(start)]
        ops = []
        while operator := self.accept(*RELATIONS):
            ops.append(operator)
            sides.append(self.side())
        return relate(ops, sides) if ops else sides[0]

    def odd_name(self, start):
        """A left side such as P(X > 2) or [ABC] that only serves as a name: skip to its equals sign."""
        end, depth = start, 0
        while end < len(self.tokens) and (depth or self.tokens[end].text != "="):
            text = self.tokens[end].text
            depth += {"(": 1, "[": 1, "\\{": 1, "{": 1, ")": -1, "]": -1, "\\}": -1, "}": -1}.get(text, 0)
            if depth < 0 or (depth == 0 and text in (",", ";", "or", "and", *RELATIONS)):
                break
            end += 1
        name = self.tokens[start:end]
        is_name = name and name[0].kind != "num" and any(t.kind in ("sym", "word") for t in name)
        if end == len(self.tokens) or self.tokens[end].text != "=" or not is_name:
            raise Unreadable("not a value")
        self.at = end
        return Number(("sym", "".join(token.text for token in name)))

    def side(self):
        """A union of sets, a ratio, words, or an expression with its unit."""
        words = self.only_words()
        if words:
            return Text(words)
        self.currency = None
        value = self.with_unit(self.total())
        if self.peek().text == ":" and isinstance(value, Number):
            parts = [scalar(value)]
            while self.accept(":"):
                parts.append(scalar(self.total()))
            return Ratio(tuple(parts), bool(re.fullmatch("[0-5][0-9]", self.tokens[self.at - 1].text)))
        while operator := self.accept("\\cup", "\\cap", "\\setminus"):
            value = combine(operator, value, self.with_unit(self.total()))
        return value

    def only_words(self):
        """The words up to the next separator if there is nothing else, such as \\text{east}."""
        end = self.at
        while end < len(self.tokens) and (
            self.tokens[end].kind == "word"
            and (self.tokens[end].in_text or len(self.tokens[end].text) > 2)
            or (end > self.at and self.tokens[end].text == "-" and self.tokens[end].in_text)
        ):
            end += 1
        following = self.tokens[end].text if end < len(self.tokens) else ","
        if end == self.at or following not in (",", ";", "or", "and", ")", "\\}", "]", "}"):
            return None
        words = [token.text.lower() for token in self.tokens[self.at : end] if token.text != "-"]
        self.at = end
        return " ".join(words)

    def with_unit(self, value):
        if type(value) is not tuple:
            return value
        unit = self.unit()
        if self.currency:
            if unit not in (None, ((self.currency, 1),)):
                raise Unreadable("two units")
            unit = ((self.currency, 1),)
            self.currency = None
        return Number(value, unit)

    def unit(self):
        """Percent sign or unit words -> "%", a sorted tuple of (unit, exponent), or None."""
        if self.accept("%"):
            return "%"
        powers, sign, power = collections.Counter(), 1, 1
        seen = False
        while True:
            token = self.peek()
            word = token.text.lower()
            if token.kind == "word" and word in ("per", "percent"):
                self.at += 1
                if word == "percent":
                    return "%"
                sign = -1
            elif seen and self.accept("/"):
                sign = -1
            elif seen and (self.accept(".") or self.accept("*")):
                continue
            elif token.kind == "word" and word in POWER_WORDS and self.unit_ahead(1):
                self.at += 1
                power = POWER_WORDS[word]
            elif self.unit_ahead(0):
                self.at += 1
                seen = True
                if self.accept("^"):
                    exponent = self.argument()
                    if exponent[0] == "neg":
                        exponent, power = exponent[1], -1
                    if exponent[0] != "num":
                        raise Unreadable("a unit with a symbolic exponent")
                    power *= int(exponent[1])
                powers[UNITS[word]] += sign * power
                power = 1
            else:
                break
        powers.pop("unit", None)
        return tuple(sorted(powers.items())) or None

    def unit_ahead(self, ahead):
        token = self.peek(ahead)
        if token.kind != "word" or token.text.lower() not in {**UNITS, **POWER_WORDS, "percent": 0, "per": 0}:
            return False
        return token.in_text or len(token.text) > 2 or token.text in BARE_UNITS

    def total(self):
        """Terms joined by plus and minus."""
        terms, operator = [], None
        while True:
            minus = operator == "-" if operator in ("+", "-", None) else self.plus_minus(operator)
            while sign := self.accept("+", "-", "\\pm", "\\mp"):
                minus ^= sign == "-" if sign in "+-" else self.plus_minus(sign)
            term = self.product()
            terms.append(negative(term) if minus else term)
            operator = self.accept("+", "-", "\\pm", "\\mp")
            if operator is None:
                break
        return terms[0] if len(terms) == 1 else ("+", *map(scalar, terms))

    def product(self):
        """Factors joined by * or / or nothing."""
        factors = [self.power()]
        while True:
            operator = self.accept("*", "/")
            if operator is None and not self.factor_ahead(factors):
                break
            minus = False
            while operator and self.accept("-"):
                minus = not minus
            factor = self.power()
            if isinstance(factor, Matrix) and operator != "/":
                coefficient = ("*", *map(scalar, factors), *([MINUS_ONE] if minus else []))
                return Matrix(tuple(tuple(("*", coefficient, x) for x in row) for row in factor.rows))
            factor = negative(scalar(factor)) if minus else scalar(factor)
            factors.append(("inv", factor) if operator == "/" else factor)
        return factors[0] if len(factors) == 1 else ("*", *map(scalar, factors))

    def factor_ahead(self, factors):
        """Whether the next token starts a factor that is multiplied without a sign."""
        token = self.peek()
        if token.kind == "word" and self.unit_ahead(0):
            return not all(type(x) is tuple and not symbols(x) for x in factors)
        if token.kind in ("sym", "word"):
            return True
        if token.kind == "cmd":
            return token.text in ATOMS or token.text in LETTERS
        if token.kind == "num":  # (n-2) 2^n and 2^3 3^2, but neither x2 nor 71 72
            before, last = self.tokens[self.at - 1].text, factors[-1]
            return type(last) is tuple and last[0] != "num" and (before in (")", "]", "}") or last[0] == "^")
        return token.text in ("(", "[", "{") or (token.text == "|" and not self.bars)

    def power(self):
        """An atom with its exponent, factorials and degree sign."""
        base, raised = self.atom(), False
        while True:
            if self.accept("!"):
                double = self.accept("!")
                if self.peek().text == "!":
                    raise Unreadable("three factorial signs")
                base = ("!!" if double else "!", scalar(base))
            elif self.accept("@"):
                base = ("deg", scalar(base))
            elif not raised and self.accept("^"):
                base, raised = ("^", scalar(base), self.argument()), True
            else:
                return base

    def argument(self, one_digit=False):
        """A TeX argument: a group, or one token. \\frac59 takes one digit, 2^10 takes the number."""
        token = self.peek()
        if token.kind == "word" and not token.in_text or (token.kind == "num" and one_digit):
            self.split_token(token)
        if self.peek().kind == "num":
            self.at += 1
            return ("num", exact(self.tokens[self.at - 1].text))
        if self.accept("-"):
            return negative(self.argument(one_digit))
        return scalar(self.atom())

    def split_token(self, token):
        """Replace a run of letters or digits by single ones, in place."""
        if len(token.text) > 1 and token.text.isalnum():
            kind = "sym" if token.kind == "word" else "num"
            self.tokens[self.at : self.at + 1] = [
                Token(kind, char, token.start + k, token.start + k + 1, token.in_text)
                for k, char in enumerate(token.text)
            ]

    def raw(self):
        """The text of one TeX argument that is only a name: a subscript, the inside of an accent."""
        if self.peek().kind == "end":
            raise Unreadable("an argument is missing")
        start, depth = self.at, 0
        while True:
            text = self.peek().text
            if self.peek().kind == "end":
                raise Unreadable("an argument is not closed")
            depth += {"{": 1, "}": -1}.get(text, 0)
            self.at += 1
            if depth <= 0:
                break
        return "".join(token.text for token in self.tokens[start : self.at] if token.text not in "{}")

    def atom(self):
        self.deeper()
        token = self.peek()
        if token.kind == "num":
            value = self.number()
        elif token.kind in ("sym", "word"):
            value = self.symbol()
        elif token.text in CLOSING or token.text == "{":
            value = self.group()
        elif self.accept("|"):
            self.bars += 1
            value = ("abs", scalar(self.total()))
            self.expect("|")
            self.bars -= 1
        elif token.text in CURRENCY:
            self.at += 1
            self.currency = CURRENCY[token.text]
            value = self.power()
        elif token.kind == "cmd" and (token.text in ATOMS or token.text in LETTERS):
            value = ATOMS[token.text](self) if token.text in ATOMS else self.symbol()
        else:
            raise Unreadable(f"{token.text!r} where a value should start")
        self.depth -= 1
        return value

    def number(self):
        token = self.peek()
        self.at += 1
        following = self.peek()
        if token.text.endswith(".") and following.text == "(":
            raise Unreadable("a decimal point before a bracket")
        if "." in token.text and following.text in ("\\overline", "\\bar", "\\dot") and following.start == token.end:
            return ("num", self.repeating(token.text))
        if self.accept("_"):
            return based(token.text, self.raw())
        value = exact(token.text)
        if token.text.isdigit():
            value += self.mixed_part()
        return ("num", value)

    def repeating(self, head):
        """0.2\\overline{7}"""
        self.at += 1
        period = self.raw()
        if not period.isdigit() or not period.isascii() or len(period) > 200:
            raise Unreadable("a repeating part that is not digits")
        places = len(head.split(".")[1])
        return exact(head) + Fraction(int(period), (10 ** len(period) - 1) * 10**places)

    def mixed_part(self):
        """The fraction of a mixed number such as 1\\frac{4}{5} or 1 4/5, else 0."""
        start, part = self.at, None
        if self.peek().text == "\\frac":
            part = self.fraction()
        elif self.peek().kind == "num" and self.peek(1).text == "/" and self.peek(2).kind == "num":
            part = ("*", ("num", exact(self.peek().text)), ("inv", ("num", exact(self.peek(2).text))))
            self.at += 3
        if part and part[0] == "*" and part[1][0] == "num" and part[2][1][0] == "num":
            top, bottom = part[1][1], part[2][1][1]
            if 0 < top < bottom and top.denominator == bottom.denominator == 1:
                return top / bottom
        self.at = start
        return Fraction(0)

    def symbol(self):
        """A name with subscripts and primes, or a function value such as f(x)."""
        token = self.peek()
        if token.kind == "word" and not token.in_text and len(token.text) < 4:
            self.split_token(token)
            token = self.peek()
        self.at += 1
        name = token.text
        while True:
            if self.accept("_"):
                name += "_" + self.raw()
            elif self.accept("'"):
                name += "'"
            else:
                break
        if name in CONSTANTS:
            return CONSTANTS[name]
        if self.peek().text == "(" and self.is_application(name):
            self.at += 1
            inner = self.items(spread=False)
            self.expect(")")
            inner = inner if type(inner) is tuple else (inner,)
            return ("app", name, *map(scalar, inner))
        return ("sym", name)

    def is_application(self, name):
        """f(...) always; another letter only before one token, as in x(0), for n(n+1) is a product."""
        if name[0] in "fghFGH" or "'" in name:
            return True
        return self.peek(1).kind in ("num", "sym") and self.peek(2).text == ")"

    def group(self):
        """Brackets: grouping, tuple, interval, set; TeX braces are invisible."""
        opening = self.peek().text
        self.at += 1
        if opening == "\\{":
            if self.accept("\\}"):
                return Items((), braced=True)
            inner = self.items(spread=True)
            self.expect("\\}")
            return Items(inner.items if isinstance(inner, Items) else (inner,), braced=True)
        if opening in ("\\lfloor", "\\lceil"):
            value = (opening[2:], scalar(self.total()))
            self.expect(CLOSING[opening])
            return value
        bars, self.bars = self.bars, 0
        inner = self.items(spread=False)
        self.bars = bars
        if opening == "{":
            self.expect("}")
            if type(inner) is tuple:
                return Items(inner)
            return inner.expr if isinstance(inner, Number) and inner.unit is None else inner
        closing = self.expect(")", "]", "\\rangle")
        if type(inner) is tuple:
            return Group(opening, inner, closing)
        if CLOSING[opening] != closing:
            raise Unreadable("brackets that do not match")
        return inner.expr if isinstance(inner, Number) and inner.unit is None else inner

    # The commands. Each is entered with its token not yet consumed.

    def fraction(self):
        self.at += 1
        start = self.at
        top = self.argument(one_digit=True)
        middle = self.at
        bottom = self.argument(one_digit=True)
        texts = ["".join(t.text for t in self.tokens[a:b]) for a, b in ((start, middle), (middle, self.at))]
        texts = [text.removeprefix("{").removesuffix("}") for text in texts]
        if all(map(DERIVATIVE.fullmatch, texts)):
            return ("sym", "/".join(texts))
        return ("*", top, ("inv", bottom))

    def root(self):
        self.at += 1
        index = ("num", Fraction(2))
        if self.accept("["):
            index = scalar(self.total())
            self.expect("]")
        return ("^", self.argument(), ("*", ("num", Fraction(1)), ("inv", index)))

    def binomial(self):
        self.at += 1
        return ("binom", self.argument(one_digit=True), self.argument(one_digit=True))

    def function(self):
        """\\sin x, \\sin^2 x, \\sin^{-1} x, \\log_2 x, with or without brackets."""
        name = self.peek().text[1:]
        self.at += 1
        base = exponent = None
        while self.peek().text in ("_", "^") and self.peek().kind == "op":
            if self.accept("_"):
                if name != "log" or base:
                    raise Unreadable("a subscript at a function")
                base = self.argument()
            elif exponent is None and self.accept("^"):
                exponent = self.argument()
            else:
                raise Unreadable("two exponents")
        inner = self.function_argument()
        value = ("log", inner, base) if base else ("fn", name, inner)
        if exponent in (("neg", ("num", Fraction(1))), MINUS_ONE) and name in ("sin", "cos", "tan"):
            return ("fn", "arc" + name, inner)
        return ("^", value, exponent) if exponent else value

    def function_argument(self):
        """A bracket, or the factors up to the next operator, function or bracket."""
        minus = self.accept("-")
        if self.peek().text in ("(", "[", "{", "|"):
            inner = scalar(self.atom())
            return negative(inner) if minus else inner
        factors = [scalar(self.power())]
        while self.factor_ahead(factors):
            token = self.peek()
            if token.text in ("(", "[", "|", "e") or token.text[1:] in FUNCTIONS:
                break
            factors.append(scalar(self.power()))
        inner = factors[0] if len(factors) == 1 else ("*", *factors)
        return negative(inner) if minus else inner

    def decorated(self):
        """\\vec{v}, \\dot{x}_0, \\overline{AB}, \\angle ABC: a name."""
        name = self.peek().text
        self.at += 1
        if name in SHAPES:
            while self.peek().kind in ("sym", "word"):
                name += self.peek().text
                self.at += 1
                if self.accept("_"):
                    name += "_" + self.raw()
        else:
            name += "{" + self.raw() + "}"
        while self.accept("_"):
            name += "_" + self.raw()
        if self.peek().text == "(" and self.is_application(name):
            return ("app", name, scalar(self.group()))
        return ("sym", name)

    def infinity(self):
        self.at += 1
        return INFINITY

    def number_set(self):
        self.at += 1
        name = self.raw()
        if name == "R":
            return Reals(((negative(INFINITY), False, INFINITY, False),))
        return ("sym", "\\mathbb" + name)

    def empty_set(self):
        self.at += 1
        return Items((), braced=True)

    def matrix(self):
        self.at += 1
        kind = self.raw()
        if kind not in MATRICES:
            raise Unreadable(f"the environment {kind}")
        if kind == "array":
            self.raw()
        rows, row = [], []
        while True:
            row.append(scalar(self.total()))
            if self.accept("&"):
                continue
            rows.append(tuple(row))
            row = []
            if self.accept("\\\\") and self.peek().text != "\\end":
                continue
            self.expect("\\end")
            if self.raw() != kind or len({len(r) for r in rows}) != 1:
                raise Unreadable("a matrix with rows of different lengths")
            return Matrix(tuple(rows))


ATOMS = {
    "\\frac": Parser.fraction,
    "\\sqrt": Parser.root,
    "\\binom": Parser.binomial,
    "\\infty": Parser.infinity,
    "\\mathbb": Parser.number_set,
    "\\emptyset": Parser.empty_set,
    "\\begin": Parser.matrix,
    "\\pi": Parser.symbol,
    "\\lfloor": Parser.group,
    "\\lceil": Parser.group,
    **dict.fromkeys(["\\" + name for name in FUNCTIONS], Parser.function),
    **dict.fromkeys(ACCENTS | SHAPES, Parser.decorated),
}


def exact(text):
    """The digits of a number token as a Fraction."""
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent) > 6 or (exponent and abs(int(exponent)) > MAX_EXPONENT):
        raise TooBig("an exponent above 5000")
    whole, _, decimals = mantissa.partition(".")
    return Fraction(int(whole + decimals or "0"), 1) * Fraction(10) ** (int(exponent or 0) - len(decimals))


def based(digits, base):
    """312_5 -> Based; base ten is an ordinary number."""
    if not (base.isdigit() and base.isascii() and len(base) < 3 and 2 <= int(base) <= 36 and digits.isdigit()):
        raise Unreadable("a subscript on a number that is not a base")
    if max(map(int, digits)) >= int(base):
        raise Unreadable("a digit that the base does not have")
    return ("num", exact(digits)) if base == "10" else Based(int(digits, int(base)), int(base))


def negative(value):
    if isinstance(value, Matrix):
        return Matrix(tuple(tuple(("neg", x) for x in row) for row in value.rows))
    expr = scalar(value)
    return ("num", -expr[1]) if expr[0] == "num" else ("neg", expr)


def symbols(expr):
    """Names of the unknowns in an expression."""
    if expr[0] == "sym":
        return {expr[1]}
    return set().union(*(symbols(part) for part in expr[1:] if type(part) is tuple))


# ---------------------------------------------------------------------------------------------------
# Evaluation

MP = mpmath.MPContext()  # a context of our own; _LOCK guards it, and mpmath's caches of constants
_LOCK = threading.RLock()
_budget = [0.0]  # nanoseconds left for the current pair


def charge(nanoseconds):
    _budget[0] -= nanoseconds
    if _budget[0] < 0:
        raise TooBig("too much work")


def size(number):
    """Bits of numerator and denominator."""
    return number.numerator.bit_length() + number.denominator.bit_length()


TRIG = {"sin": "sin", "cos": "cos", "tan": "tan", "cot": "cot", "sec": "sec", "csc": "csc"}
MP_NAMES = TRIG | {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh",
    "ln": "ln", "log": "ln", "lg": "log10", "exp": "exp",
}  # fmt: skip


class Evaluator:
    """Evaluate expressions at a point {symbol: Fraction}: exact Fractions as long as possible, then real or
    complex numbers with `bits` of precision. `top` is the binary magnitude of the largest inexact number
    seen and `exact_bits` the size of the largest Fraction that was rounded: together they bound the error."""

    def __init__(self, bits, point=None):
        self.bits, self.point, self.top, self.exact_bits = bits, point or {}, 0, 0
        self.in_degrees = False
        MP.prec = bits

    def value(self, expr):
        charge(2000)
        return getattr(self, "do_" + NODES[expr[0]])(*expr[1:])

    def inexact(self, number):
        if isinstance(number, Fraction):
            self.exact_bits = max(self.exact_bits, size(number))
            return MP.mpf(number.numerator) / number.denominator
        return number

    def note(self, number, cost=4000):
        """Book an inexact result: its cost, its magnitude, and that it is finite."""
        charge(cost * (self.bits / 256) ** 1.5)
        if not MP.isfinite(number):
            raise NoValue("not a finite number")
        if isinstance(number, MP.mpc) and number.imag == 0:
            number = number.real
        if number != 0:
            self.top = max(self.top, MP.mag(number))
        return number

    def do_num(self, number):
        return number

    def do_sym(self, name):
        return self.point[name]

    def do_const(self, name):
        return self.note({"e": MP.e, "pi": MP.pi, "i": MP.j}[name] * 1)

    def do_inf(self):
        raise Unreadable("arithmetic with infinity")

    def do_neg(self, inner):
        return -self.value(inner)

    def do_deg(self, inner):
        value = self.value(inner)
        return self.multiply(value, self.note(MP.pi / 180)) if self.in_degrees else value

    def do_sum(self, *terms):
        total = Fraction(0)
        for term in terms:
            value = self.value(term)
            if isinstance(total, Fraction) and isinstance(value, Fraction):
                charge(size(total) * size(value) / 300)
                total += value
            else:
                total = self.note(self.inexact(total) + self.inexact(value))
        return total

    def multiply(self, a, b):
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            charge(size(a) * size(b) / 300)
            return a * b
        return self.note(self.inexact(a) * self.inexact(b))

    def do_product(self, *factors):
        total = Fraction(1)
        for factor in factors:
            total = self.multiply(total, self.value(factor))
        return total

    def do_inverse(self, inner):
        value = self.value(inner)
        if value == 0:
            raise NoValue("division by zero")
        return 1 / value if isinstance(value, Fraction) else self.note(1 / value)

    def do_power(self, base, exponent):
        exponent = self.value(exponent)
        if base == CONSTANTS["e"]:
            return self.function("exp", exponent)
        base = self.value(base)
        if base == 0:
            if MP.re(self.inexact(exponent)) < 0:
                raise NoValue("division by zero")
            return Fraction(int(exponent == 0))
        if not isinstance(exponent, Fraction):
            return self.general_power(base, exponent)
        top, bottom = exponent.numerator, exponent.denominator
        if isinstance(base, Fraction) and bottom == 1:
            return self.integer_power(base, top)
        if bottom == 1 and abs(top) < 1000:
            return self.note(base**top, 40_000)
        if bottom % 2 and not isinstance(base, MP.mpc) and base < 0:
            root = self.general_power(-base, exponent)  # the real root of a negative number
            return -root if top % 2 else root
        if exponent == Fraction(1, 2):
            return self.square_root(base)
        return self.general_power(base, exponent)

    def integer_power(self, base, exponent):
        bits = size(base) * abs(exponent)
        if bits > MAX_POWER_BITS and abs(base) != 1:
            raise TooBig("a power with too many digits")
        charge(0.03 * bits**1.58)
        return base**exponent

    def square_root(self, base):
        if isinstance(base, Fraction) and base > 0:
            roots = math.isqrt(base.numerator), math.isqrt(base.denominator)
            if roots[0] ** 2 == base.numerator and roots[1] ** 2 == base.denominator:
                return Fraction(*roots)
        return self.note(MP.sqrt(self.inexact(base)), 20_000)

    def general_power(self, base, exponent):
        base, exponent = self.inexact(base), self.inexact(exponent)
        if exponent != 0 and MP.mag(exponent) + MP.mag(MP.mag(base) + 2) > 20:
            raise TooBig("a power with too many digits")
        charge(100_000 * (self.bits / 256) ** 1.5)
        return self.note(MP.power(base, exponent), 0)

    def do_function(self, name, inner):
        outer, self.in_degrees = self.in_degrees, name in TRIG
        value = self.value(inner)
        self.in_degrees = outer
        return self.function(name, value)

    def function(self, name, value):
        value = self.inexact(value)
        if value != 0 and MP.mag(value) > 20 and not name.startswith(("ln", "log", "lg", "arc")):
            raise TooBig("a function of a huge number")
        if value == 0 and name in ("ln", "log", "lg", "cot", "csc"):
            raise NoValue("not defined at zero")
        charge(50_000 * (self.bits / 256) ** 1.5)
        try:
            return self.note(getattr(MP, MP_NAMES[name])(value), 0)
        except (ZeroDivisionError, ValueError):
            raise NoValue("a function where it is not defined") from None

    def do_log(self, inner, base):
        bottom = self.function("ln", self.value(base))
        if bottom == 0:
            raise NoValue("a logarithm to base one")
        return self.note(self.function("ln", self.value(inner)) / bottom)

    def do_app(self, name, *inner):
        """An unknown function: a fixed pseudo-random rational for each name and arguments."""
        values = [self.value(x) for x in inner]
        shown = [str(v) if isinstance(v, Fraction) else MP.nstr(v, 25) for v in values]
        digest = hashlib.sha256(repr((name, shown)).encode("utf-8", "replace")).digest()
        return Fraction(int.from_bytes(digest[:4], "big") + 1, 1 << 30)

    def do_factorial(self, inner):
        n = self.value(inner)
        if isinstance(n, Fraction) and n.denominator == 1:
            if n < 0:
                raise NoValue("the factorial of a negative number")
            if n > MAX_FACTORIAL:
                raise TooBig("a factorial above 3000!")
            charge(300 * int(n))
            return Fraction(math.factorial(int(n)))
        return self.gamma(self.inexact(n) + 1)

    def gamma(self, x):
        if MP.mag(x) > 12 or self.bits > 1024:
            raise TooBig("a factorial above 3000!")
        charge(1_000_000 * (self.bits / 256) ** 2)
        return self.note(MP.gamma(x), 0)

    def do_double_factorial(self, inner):
        n = self.value(inner)
        if not isinstance(n, Fraction) or n.denominator != 1 or n < 0:
            raise Unreadable("a double factorial of something that is not a natural number")
        if n > MAX_FACTORIAL:
            raise TooBig("a factorial above 3000!!")
        charge(300 * int(n))
        return Fraction(math.prod(range(int(n), 0, -2)))

    def do_binomial(self, n, k):
        n, k = self.value(n), self.value(k)
        if all(isinstance(x, Fraction) and x.denominator == 1 and x >= 0 for x in (n, k)):
            if n > MAX_BINOMIAL:
                raise TooBig("a binomial coefficient above n = 5000")
            charge(300 * int(n))
            return Fraction(math.comb(int(n), int(k)))
        n, k = self.inexact(n), self.inexact(k)
        bottom = self.gamma(k + 1) * self.gamma(n - k + 1)
        return self.note(self.gamma(n + 1) / bottom)

    def do_abs(self, inner):
        value = self.value(inner)
        return abs(value) if isinstance(value, Fraction) else self.note(abs(value))

    def do_floor(self, inner, up=False):
        value = self.value(inner)
        if isinstance(value, Fraction):
            return Fraction(math.ceil(value) if up else math.floor(value))
        if isinstance(value, MP.mpc) or MP.mag(value) > self.bits // 2:
            raise NoValue("the floor of this number")
        nearest = MP.nint(value)
        if abs(value - nearest) < MP.mpf(2) ** (-self.bits // 2):
            return Fraction(int(nearest))
        return Fraction(int(MP.ceil(value) if up else MP.floor(value)))

    def do_ceil(self, inner):
        return self.do_floor(inner, up=True)


NODES = {
    "num": "num", "sym": "sym", "const": "const", "inf": "inf", "neg": "neg", "deg": "deg", "+": "sum", "*": "product",
    "inv": "inverse", "^": "power", "fn": "function", "log": "log", "app": "app", "!": "factorial",
    "!!": "double_factorial", "binom": "binomial", "abs": "abs", "floor": "floor", "ceil": "ceil",
}  # fmt: skip
NUMERATORS = [n for n in range(60, 800) if n % 211]


@functools.lru_cache(64)
def points(names):
    """Sixteen fixed rational points, none an integer: all positive ones and ones of mixed sign by turns."""
    rng = random.Random(20)
    signs = [[1] * len(names), [-1] * len(names)] + [rng.choices((1, -1), k=len(names)) for _ in range(7)]
    order = [signs[k // 2 + 1] if k % 2 else signs[0] for k in range(16)]
    return [{n: Fraction(s * rng.choice(NUMERATORS), 211) for n, s in zip(names, row)} for row in order]


def nonzero(difference, point, bits=320):
    """Evaluate difference(evaluator) -> (number or None if surely not zero, bits used)."""
    for _ in range(3):
        work = Evaluator(bits, point)
        value = difference(work)
        needed = 256 + 2 * work.exact_bits  # the test points alone have 18 bits
        if isinstance(value, Fraction) or bits >= needed:
            break
        if needed > MAX_BITS:
            raise TooBig("constants of very different size")
        bits = needed
    if isinstance(value, Fraction):
        return (Fraction(0) if value == 0 else None), bits
    if value != 0 and MP.mag(value) > work.top - bits + 64:
        return None, bits
    return abs(value), bits


def is_zero(difference, names):
    """Whether `difference` (Evaluator -> number) vanishes: for a constant exactly, else at >= 5 points.

    A number that is zero only up to rounding is computed again with twice the precision: rounding noise
    shrinks, a tiny true difference (e^{pi sqrt 163} is 1e-30 off an integer) does not."""
    if len(names) > MAX_SYMBOLS:
        raise TooBig("too many unknowns")
    good = 0
    for point in points(tuple(sorted(names))) if names else [{}]:
        try:
            small, bits = nonzero(difference, point)
        except NoValue:
            if not names:
                raise
            continue
        if small is None:
            return False
        good += 1
        if good == 1 and not isinstance(small, Fraction):
            again, more = nonzero(difference, point, 2 * bits)
            reference = small if small != 0 else MP.mpf(2) ** -bits
            if again is None or abs(again) > reference * MP.mpf(2) ** (-bits // 2):
                return False
        if good == 5:
            break
    if names and good < 4:
        raise NoValue("not defined at the test points")
    return True


def equal_exprs(a, b):
    """Same value (constants), or same function of the unknowns."""
    if a == b and a[0] == "num":
        return True
    if a[0] == b[0] == "num":
        return False
    return is_zero(lambda work: difference_of(work, a, b), symbols(a) | symbols(b))


def difference_of(work, a, b):
    return work.do_sum(a, ("neg", b))


def proportional(a, b, positive=False):
    """Whether a = c b for one constant c != 0 (c > 0 if `positive`): two forms of one equation."""
    names = symbols(a) | symbols(b)
    if not names:
        return False
    first = points(tuple(sorted(names)))[-1]
    work = Evaluator(256, first)
    at_first = [work.value(x) for x in (a, b)]
    if any(x == 0 or (not isinstance(x, Fraction) and MP.mag(x) < work.top - 192) for x in at_first):
        return False
    if positive and MP.re(work.inexact(at_first[0]) / work.inexact(at_first[1])) < 0:
        return False

    def cross(work):
        values = [work.value(x) for x in (a, b)]
        point, work.point = work.point, first
        others = [work.value(x) for x in (a, b)]
        work.point = point
        right = work.multiply(values[1], others[0])
        left = work.multiply(values[0], others[1])
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return left - right
        return work.note(work.inexact(left) - work.inexact(right))

    return is_zero(cross, names)


# ---------------------------------------------------------------------------------------------------
# Sets of reals and relations


def pieces_of(value):
    """The intervals (low, closed, high, closed) of a set of reals, or None."""
    if isinstance(value, Reals):
        return value.pieces
    if isinstance(value, Group) and len(value.items) == 2 and value.opening in "([" and value.closing in ")]":
        low, high = map(scalar, value.items)
        return ((low, value.opening == "[", high, value.closing == "]"),)
    if isinstance(value, Items) and value.braced:
        return tuple((point, True, point, True) for point in map(scalar, value.items))
    return None


@functools.cmp_to_key
def by_value(a, b):
    return order(a, b)


def order(a, b):
    """-1, 0 or 1 for two real constants or infinities."""
    infinite = [{INFINITY: 1, ("neg", INFINITY): -1}.get(x, 0) for x in (a, b)]
    if any(infinite):
        return (infinite[0] > infinite[1]) - (infinite[0] < infinite[1])
    if symbols(a) | symbols(b):
        raise Unreadable("a union with symbolic ends")
    gap = Evaluator(512).value(("+", a, ("neg", b)))
    if isinstance(gap, MP.mpc):
        raise Unreadable("an interval with complex ends")
    if not isinstance(gap, Fraction) and equal_exprs(a, b):
        return 0
    return (gap > 0) - (gap < 0)


def normal(pieces):
    """Sorted, without empty intervals, overlapping and touching ones merged."""
    out = []
    for low, low_in, high, high_in in sorted(pieces, key=lambda p: (by_value(p[0]), not p[1])):
        where = order(low, high)
        if where > 0 or (where == 0 and not (low_in and high_in)):
            continue
        if out:
            gap = order(out[-1][2], low)
            if gap > 0 or (gap == 0 and (out[-1][3] or low_in)):
                last = order(out[-1][2], high)
                if last < 0 or (last == 0 and high_in):
                    out[-1] = (*out[-1][:2], high, high_in)
                continue
        out.append((low, low_in, high, high_in))
    return tuple(out)


def complement(pieces):
    out, low, low_in = [], ("neg", INFINITY), False
    for piece in normal(pieces):
        out.append((low, low_in, piece[0], not piece[1]))
        low, low_in = piece[2], not piece[3]
    return normal([*out, (low, low_in and low != INFINITY, INFINITY, False)])


def combine(operator, left, right):
    """Union, intersection or difference of two sets of reals."""
    a, b = pieces_of(left), pieces_of(right)
    if a is None or b is None:
        raise Unreadable("a union of things that are not sets of reals")
    if operator == "\\cup":
        return Reals(a + b)
    if operator == "\\cap":
        b = complement(b)
    return Reals(complement(complement(a) + normal(b)))


def is_ray(value):
    return isinstance(value, Named) and isinstance(value.value, Reals)


def combine_rays(word, left, right):
    """x < 1 or x > 6; x > 1 and x < 3"""
    if left.name != right.name:
        raise Unreadable("inequalities in two unknowns")
    return Named(left.name, combine({"or": "\\cup", "and": "\\cap"}[word], left.value, right.value), True)


def is_name(side):
    """2: one name such as x, f(x), (x, y); 1: an expression that a problem may ask for, such as a + b;
    0: something to solve, such as x^2, or no name at all."""
    if isinstance(side, Text):
        return 2
    if isinstance(side, Group):
        return 2 * all(is_name(item) == 2 for item in side.items)
    if not isinstance(side, Number) or side.unit:
        return 0
    expr = side.expr
    if expr[0] in ("sym", "app"):
        return 2
    called = expr[0] == "abs" or (expr[0] == "fn" and expr[1] in TRIG)
    return int(len(symbols(expr)) > 1 or (called and bool(symbols(expr))))


def is_closed(side):
    return isinstance(side, Number) and not symbols(side.expr) and "app" not in repr(side.expr)


def relate(ops, sides):
    """A chain such as x = 38/2 = 19 or -4 <= x < 9 -> Named, Relation, or the value of a true chain."""
    if ops == ["\\in"]:
        return Named(sides[0], sides[1], True)
    if set(ops) == {"="}:
        return equation(sides)
    return inequality(ops, sides)


def equation(sides):
    if len(sides) == 2 and is_name(sides[1]) == 2 and is_closed(sides[0]):
        sides = sides[::-1]
    strength = is_name(sides[0])
    values = sides[1:] if strength else sides
    kept = [value for value in values[:-1] if is_name(value) != 2] + [values[-1]]
    if not strength and not all(map(is_closed, sides)):
        if len(sides) == 2:
            return Relation("=", scalar(sides[0]), scalar(sides[1]))
        raise Unreadable("a chain of equations")
    if not all(same(left, right) for left, right in zip(kept, kept[1:])):
        raise NoValue("a false chain of equations")
    return Named(sides[0], kept[-1], strength == 2) if strength else kept[-1]


def inequality(ops, sides):
    flipped = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!="}
    if not set(ops) <= set(flipped):
        raise Unreadable("mixed relations")
    if len(sides) == 2 and is_name(sides[1]) == 2 and is_closed(sides[0]):
        ops, sides = [flipped[ops[0]]], sides[::-1]
    if len(sides) == 2 and is_name(sides[0]) == 2 and is_closed(sides[1]):
        end = scalar(sides[1])
        below, above = (("neg", INFINITY), False, end, "=" in ops[0]), (end, "=" in ops[0], INFINITY, False)
        if ops[0] == "!=":
            below, above = (*below[:3], False), (above[0], False, *above[2:])
        rays = {"<": [below], ">": [above], "!": [below, above]}[ops[0][0]]
        return Named(sides[0], Reals(tuple(rays)), True)
    if len(sides) == 3 and ops[0][0] == ops[1][0] != "!" and is_name(sides[1]) == 2:
        if ops[0][0] == ">":
            ops, sides = ops[::-1], sides[::-1]
        if is_closed(sides[0]) and is_closed(sides[2]):
            piece = (scalar(sides[0]), "=" in ops[0], scalar(sides[2]), "=" in ops[1])
            return Named(sides[1], Reals((piece,)), True)
    if len(sides) != 2:
        raise Unreadable("a chain of inequalities")
    if ops[0][0] == ">":
        ops, sides = [flipped[ops[0]]], sides[::-1]
    return Relation(ops[0], scalar(sides[0]), scalar(sides[1]))


# ---------------------------------------------------------------------------------------------------
# Comparison


def same(a, b):
    """Whether the answer `a` has the value of the label `b`."""
    charge(1000)
    if isinstance(a, (Named, Relation)) or isinstance(b, (Named, Relation)):
        return same_relation(a, b)
    if isinstance(a, Number) and isinstance(b, Number):
        return same_number(a, b)
    if isinstance(a, Text) or isinstance(b, Text):
        return letters(a) is not None and letters(a) == letters(b)
    if isinstance(a, Reals) or isinstance(b, Reals):
        return same_reals(a, b)
    if isinstance(a, Items) or isinstance(b, Items):
        return same_items(a, b)
    if isinstance(a, Group) and isinstance(b, Group):
        brackets = (a.opening, a.closing) == (b.opening, b.closing)
        return brackets and len(a.items) == len(b.items) and all(map(same, a.items, b.items))
    if isinstance(a, Matrix) and isinstance(b, Matrix):
        shapes = [[len(row) for row in m.rows] for m in (a, b)]
        return shapes[0] == shapes[1] and all(all(map(equal_exprs, p, q)) for p, q in zip(a.rows, b.rows))
    if isinstance(a, Ratio) and isinstance(b, Ratio):
        return same_ratio(a, b)
    return isinstance(a, Based) and a == b


def same_number(a, b):
    """A unit may be left out, but two units must agree. p% is p/100, or p with the sign left out."""
    infinite = [x.expr for x in (a, b) if x.expr in (INFINITY, ("neg", INFINITY))]
    if infinite:
        return a.expr == b.expr
    units = [x.unit or (DEGREES if has_degrees(x.expr) else None) for x in (a, b)]
    if "%" in units and units[0] != units[1]:
        percent, plain = (a, b) if units[0] == "%" else (b, a)
        if plain.unit:
            return False
        share = ("*", percent.expr, ("num", Fraction(1, 100)))
        return equal_exprs(share, plain.expr) or equal_exprs(percent.expr, plain.expr)
    if None not in units and units[0] != units[1]:
        return False
    if a.expr[0] == b.expr[0] == "sym" and b.expr[1] in tuple("ABCDE"):
        return a.expr[1].upper() == b.expr[1]  # a choice letter
    return equal_exprs(a.expr, b.expr)


def same_ratio(a, b):
    """3 : 4 is 6 : 8, but 1:20 is not 2:40 and 1:00 is not 12:00."""
    if len(a.parts) != len(b.parts):
        return False
    if a.clock and b.clock:
        return all(map(equal_exprs, a.parts, b.parts))
    (p, *ps), (q, *qs) = a.parts, b.parts
    return all(equal_exprs(("*", p, y), ("*", q, x)) for x, y in zip(ps, qs)) and not any(
        equal_exprs(x, ("num", Fraction(0))) for x in a.parts + b.parts
    )


DEGREES = (("degree", 1),)


def has_degrees(expr):
    """A degree sign outside of a trigonometric function is a unit."""
    if expr[0] == "deg":
        return True
    return expr[0] != "fn" and any(type(part) is tuple and has_degrees(part) for part in expr[1:])


def letters(value):
    """Lower-case text of words, or of a symbol or a product of symbols that could be a word."""
    if isinstance(value, Text):
        return value.words
    if isinstance(value, Number) and value.unit is None:
        factors = value.expr[1:] if value.expr[0] == "*" else (value.expr,)
        if all(type(x) is tuple and x[0] in ("sym", "const") for x in factors):
            return "".join(x[1] for x in factors).lower()
    return None


def same_items(a, b):
    """Lists and sets: as multisets. A bare list also equals the tuple of the same order."""
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Items) and not isinstance(other, Items):
            if isinstance(other, Group):
                round_ = (other.opening, other.closing) == ("(", ")") and not one.braced
                return round_ and len(one.items) == len(other.items) and all(map(same, one.items, other.items))
            return one.braced and len(one.items) == 1 and same(one.items[0], other)
    if len(a.items) != len(b.items):
        return False
    left = list(a.items)
    for wanted in b.items:
        found = next((k for k, item in enumerate(left) if same(item, wanted)), None)
        if found is None:
            return False
        del left[found]
    return True


def same_reals(a, b):
    pieces = pieces_of(a), pieces_of(b)
    if None in pieces:
        return False
    x, y = (normal(p) if len(p) > 1 else p for p in pieces)
    return len(x) == len(y) and all(
        p[1] == q[1] and p[3] == q[3] and same_end(p[0], q[0]) and same_end(p[2], q[2]) for p, q in zip(x, y)
    )


def same_end(a, b):
    infinite = (INFINITY, ("neg", INFINITY))
    return a == b if a in infinite or b in infinite else equal_exprs(a, b)


def same_relation(a, b):
    """The value alone is enough on either side; two names must agree; else compare as equations."""
    if isinstance(a, Named) and isinstance(b, Named):
        if a.name == b.name and same(a.value, b.value):
            return True
    elif isinstance(a, Named) and not isinstance(b, Relation):
        return same(a.value, b)
    elif isinstance(b, Named) and not isinstance(a, Relation):
        return b.strict and same(a, b.value)
    try:
        p, q = as_relation(a), as_relation(b)
    except Unreadable:
        return False
    forms = [("+", r.left, ("neg", r.right)) for r in (p, q)]
    return p.op == q.op and proportional(*forms, positive=p.op[0] == "<")


def as_relation(value):
    if isinstance(value, Named):
        sides = (("sym", x.words) if isinstance(x, Text) else scalar(x) for x in (value.name, value.value))
        return Relation("=", *sides)
    if not isinstance(value, Relation):
        raise Unreadable("not an equation")
    return value


# ---------------------------------------------------------------------------------------------------
# Verdict


@functools.lru_cache(2048)
def read_cached(text):
    """All readings of a text and the work they cost (charged on every use, so that a cached label changes
    no verdict)."""
    before = _budget[0]
    readings, problem = [], None
    variants = [tokenize(text)]
    if re.search(r"(?<![.\d])\d+[eE][+-]?\d", text):
        variants.append(tokenize(text, scientific=False))
    for tokens in variants:
        joined = join_thousands(tokens)
        for reading in [tokens, joined] if len(joined) != len(tokens) else [tokens]:
            try:
                readings.append(Parser(reading).answer())
            except (Unreadable, TooBig) as error:
                problem = error
    if not readings:
        raise problem
    return readings, before - _budget[0]


def read(text):
    before = _budget[0]
    readings, cost = read_cached(text)
    _budget[0] = before
    charge(cost)
    return readings


def compare(pred, label):
    """The reason (a key of REASONS) for two trimmed texts."""
    if not pred or not label:
        return "empty"
    if pred == label:
        return "ok"
    if re.fullmatch(r"-?\d{1,18}", pred, re.ASCII) and re.fullmatch(r"-?\d{1,18}", label, re.ASCII):
        return "ok" if int(pred) == int(label) else "wrong"
    if max(len(pred), len(label)) > MAX_BOX:
        return "too_big"
    reason = "wrong"
    try:
        pairs = [(a, b) for a in read(pred) for b in read(label)]
    except NoValue:
        return "wrong"
    except Unreadable:
        return "parse"
    for a, b in pairs:
        try:
            if same(a, b):
                return "ok"
        except NoValue:
            continue
        except Unreadable:
            reason = "parse"
    return reason


def equal(pred, label):
    """Compare two answers as values -> Verdict. Identical texts are right, empty ones never are."""
    pred, label = ("" if x is None else str(x) for x in (pred, label))
    with _LOCK:
        _budget[0] = BUDGET_NS
        try:
            reason = compare(clean(pred), clean(label))
        except (TooBig, RecursionError, MemoryError, OverflowError):
            reason = "too_big"
        except Exception:  # must not end a training run; the trainer counts and reports `died`
            reason = "died"
    return Verdict(reason == "ok", reason, pred)


def verify(response, label, think="auto"):
    """Grade a whole response against the label -> Verdict. Never raises for any text.

    think: "auto" grades the text after the last </think>, or all of it when there are no tags; "require"
    when the prompt opened the thinking part, so that a response without </think> is an unfinished thought;
    "none" ignores tags."""
    found = extract("" if response is None else str(response), think)
    if found.status != "ok":
        return Verdict(False, found.status, found.answer)
    verdict = equal(found.answer, label)
    if len(found.others) >= MAX_BOXES:
        return Verdict(False, "hedge", found.answer)
    # Each box must fit the label and the last box: 50% would fit both 0.5 and 50, which are different.
    for other in found.others:
        if not equal(other, found.answer).correct or equal(other, label).correct != verdict.correct:
            return Verdict(False, "hedge", found.answer)
    return verdict


# ---------------------------------------------------------------------------------------------------
# Worker processes


def worker_main():
    """Serve [response, label, think, seconds] lines on stdin with [correct, reason, answer] lines."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan after kill -9 of the trainer
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    replies, requests = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # a stray print must not break the protocol
    equal("\\frac{1}{2}", "\\sqrt{3}")
    print("ready", file=replies, flush=True)
    for line in requests:
        response, label, think, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # last line of defence: the default action kills
        verdict = verify(response, label, think)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), file=replies, flush=True)


class Worker:
    """One worker process, started when needed, killed at the deadline."""

    def __init__(self):
        self.process, self.served = None, 0

    def start(self):
        scrubbed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        env = {key: value for key, value in os.environ.items() if key not in scrubbed}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # exec, never fork: the trainer holds CUDA and NCCL state
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )
        self.served, self.rest = 0, b""
        os.set_blocking(self.process.stdin.fileno(), False)
        if self.exchange(b"", time.monotonic() + 60) != b"ready":
            self.stop()
            raise RuntimeError("verify.py --worker did not start; run it by hand to see why")

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None

    def exchange(self, data, deadline):
        """Send `data`, return the next reply line; TimeoutError at the deadline, EOFError if it died."""
        stdin, stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        while b"\n" not in self.rest:
            left = deadline - time.monotonic()
            ready = select.select([stdout], [stdin] if data else [], [], max(0, left))
            if not any(ready[:2]):
                raise TimeoutError
            if ready[1]:
                data = data[os.write(stdin, data[: 1 << 16]) :]
            if ready[0]:
                chunk = os.read(stdout, 1 << 16)
                if not chunk:
                    raise EOFError
                self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\n")
        return line

    def grade(self, response, label, think, timeout_s):
        if self.process is None or self.served >= 50_000:
            self.stop()
            self.start()
        request = json.dumps([response, label, think, 2 * timeout_s + 1]).encode() + b"\n"
        self.served += 1
        try:
            return Verdict(*json.loads(self.exchange(request, time.monotonic() + timeout_s)))
        except TimeoutError:
            reason = "timeout"
        except (EOFError, BrokenPipeError, json.JSONDecodeError):
            reason = "died"
        self.stop()
        return Verdict(False, reason, None)


class Verifier:
    """A pool of worker processes for a trainer; usable from any number of threads.

    num_workers: processes. timeout_s: seconds a pair may take from its dispatch to a worker; then the
    worker is killed, the verdict is (False, "timeout", None) and the next pair gets a new process."""

    def __init__(self, num_workers=2, timeout_s=2.0):
        self.timeout_s, self.workers, self.local = timeout_s, [], threading.local()
        self.pool = ThreadPoolExecutor(num_workers, "verify", initializer=self.new_worker)
        # Each pool thread owns one worker: the death signal of a child follows the thread that started it
        self.warm = [self.pool.submit(self.warm_up) for _ in range(num_workers)]

    def new_worker(self):
        self.local.worker = Worker()
        self.workers.append(self.local.worker)

    def warm_up(self):
        if self.local.worker.process is None:
            self.local.worker.start()

    def run(self, response, label, think):
        return self.local.worker.grade(response, label, think, self.timeout_s)

    def submit(self, response, label, think="auto") -> Future:
        """Start grading one response; `.result()` of the future is its Verdict."""
        return self.pool.submit(self.run, response, label, think)

    def score(self, pairs, think="auto"):
        """Grade (response, label) pairs -> list of Verdict in the same order."""
        return [future.result() for future in [self.submit(*pair, think) for pair in pairs]]

    def close(self):
        """Finish what was submitted, then end the worker processes."""
        self.pool.shutdown()
        for worker in self.workers:
            worker.stop()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---------------------------------------------------------------------------------------------------
# Command line


def read_jsonl(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def audit(path):
    """Report what the labels of a file will do; exit status 1 when one can never be matched."""
    raise NotImplementedError


def main(argv=None):
    parser = argparse.ArgumentParser(description="Grade answers. See the top of verify.py.")
    parser.add_argument("response", nargs="?", help="a response with a box, or the bare answer")
    parser.add_argument("label", nargs="?", help="the right answer")
    parser.add_argument("--cases", metavar="FILE", help="JSONL with response, label[, think]: print verdicts")
    parser.add_argument("--audit", metavar="FILE", help="JSONL with label or answer: report on the labels")
    parser.add_argument("--think", default="auto", choices=("auto", "require", "none"))
    parser.add_argument("--worker", action="store_true", help="serve a Verifier (internal)")
    args = parser.parse_args(argv)
    if args.worker:
        return worker_main()
    if args.audit:
        return audit(args.audit)
    if args.cases:
        for case in read_jsonl(args.cases):
            verdict = verify(case["response"], case["label"], case.get("think", args.think))
            print(json.dumps(verdict._asdict()))
        return 0
    if args.label is None:
        parser.error("give RESPONSE and LABEL, or --cases FILE, or --audit FILE")
    verdict = verify(args.response, args.label, args.think)
    print(f"{'correct' if verdict.correct else 'not correct'} ({verdict.reason}): {REASONS[verdict.reason]}")
    return 0 if verdict.correct else 1


if __name__ == "__main__":
    sys.exit(main())
