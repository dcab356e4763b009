"""Pairs of label and answer for the verifier: an oracle that is right by construction.

A recipe knows the value behind its label (two integers, the roots of a polynomial, the ends of an
interval), so its rewrites and edits are written from the value and not from the text. Shapes follow
what real label files contain; the labels are our own. RECIPES, at the end, lists them.
"""

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Case(NamedTuple):
    """A label, answers of the same value, answers of another value.

    `;;` and line ends separate answers.
    """

    label: str
    same: str
    edits: str


class Pair(NamedTuple):
    """A response to grade against a label; expected: whether its `answer` equals the label."""

    response: str
    label: str
    expected: bool
    answer: str


def texts(block: str) -> list[str]:
    """The answers of a block."""
    return [text.strip() for text in block.replace("\n", ";;").split(";;") if text.strip()]


def frac(p: int, q: int) -> str:
    """p/q as a fraction of LaTeX with the sign in front."""
    return f"{'-' if p < 0 else ''}\\frac{{{abs(p)}}}{{{q}}}"


def poly(coefficients: Sequence[int], name: str = "x") -> str:
    """[c0, c1, c2] -> c2x^{2}+c1x+c0, without zero terms and unit coefficients."""
    out = ""
    for power in reversed(range(len(coefficients))):
        c, unknown = coefficients[power], ["", name, f"{name}^{{{power}}}"][min(power, 2)]
        if c:
            digits = "" if abs(c) == 1 and unknown else str(abs(c))
            out += ("-" if c < 0 else "+" if out else "") + digits + unknown
    return out


def expanded(roots: Sequence[int]) -> list[int]:
    """Coefficients [c0, c1, ...] of the product of all (x - root)."""
    out = [1]
    for root in roots:
        out = [low - root * high for low, high in zip([0, *out], [*out, 0], strict=True)]
    return out


def factored(roots: Sequence[int], name: str = "x") -> str:
    """(x-1)(x+2) for the roots 1, -2."""
    return "".join(f"({name}{-root:+d})" if root else name for root in roots)


def integer(rng: random.Random) -> Case:
    n = rng.choice((rng.randrange(2, 1000), rng.randrange(10**4, 10**9), -rng.randrange(2, 500)))
    k = rng.randrange(2, 9)
    same = rf"""{n}.0 ;; {n}. ;; {n * k}/{k} ;; {frac(n * k, k)} ;; x = {n} ;; {n + k} - {k}
        f({k})={n} ;; {n}\text{{ cm}} ;; \mathbf{{{n}}} ;; \left({n}\right) ;; ${n}$ ;; {n}\,
        {n * k}/{k} = {n} ;; a+b = {n} ;; \text{{{n}}} ;; \displaystyle {n} ;; {n} \cdot 1"""
    if n > 0:
        same += rf";; 0{n} ;; +{n} ;; \sqrt{{{n * n}}} ;; |{-n}| ;; \lfloor {n}.5 \rfloor"
    else:
        same += rf";; −{-n} ;; -\frac{{{-n * k}}}{{{k}}}"
    for mark in (",", "{,}", "\\,", ",\\!", "\\;") if n > 9999 else ():
        same += ";;" + f"{n:,}".replace(",", mark)
    # 10^{-40} is far below what float64 can hold next to n: a tolerance would accept it
    edits = rf"""{n + 1} ;; {n - 1} ;; {-n} ;; {n}0 ;; {n}.5 ;; {n}, {n + 1} ;; \pm {n} ;; x \ne {n}
        {n} \text{{ or }} {n + k} ;; [{n - 1}, {n + 1}] ;; {n - 1} = {n} ;; x = {n - 1} = {n}
        {n}^2 ;; x^2 = {n} ;; {n}x ;; {n}i ;; \text{{not }} {n} ;; \approx {n} ;; {n} {k}
        {n} \text{{ to }} {n + k} ;; {n}\ldots ;; {n}+10^{{-40}} ;; {n}.0000001 ;; {n}_7
        \frac{{{n}}}{{0}} ;; ({n}, {n})"""
    return Case(rng.choice((f"{n}", f"${n}$", f"\\boxed{{{n}}}", f"{n}.")), same, edits)


def fraction(rng: random.Random) -> Case:
    q = rng.choice((2, 4, 5, 7, 8, 9, 12, 13, 16, 25, 101))
    p = rng.choice([p for p in range(1, 60) if math.gcd(p, q) == 1]) * rng.choice((1, 1, -1))
    k, sign, label, n = rng.randrange(2, 9), "-" if p < 0 else "", frac(p, q), abs(p)
    scaled = frac(p * k, q * k)
    same = rf"""{label} ;; {sign}\dfrac{{{n}}}{{{q}}} ;; {sign}\tfrac{{{n}}}{{{q}}} ;; {p}/{q}
        \frac{{{p}}}{{{q}}} ;; {scaled} ;; {p} \div {q} ;; \frac{{{-p}}}{{{-q}}} ;; x={label}
        {p}\cdot\frac{{1}}{{{q}}} ;; {scaled} = {label} ;; {p}\cdot {q}^{{-1}}
        {{{p} \over {q}}}"""
    if n > q:
        same += rf";; {sign}{n // q}\frac{{{n % q}}}{{{q}}} ;; {sign}{n // q} {n % q}/{q}"
    if q < 10:
        same += rf";; {sign}\frac{{{n}}}{q}"
    if n < 10 and q < 10:
        same += rf";; {sign}\frac{n}{q} ;; {sign}\frac {n}{q}"
    decimal = f"{p / q:.12f}".rstrip("0")
    if Fraction(decimal) == Fraction(p, q):
        same += f";; {decimal} ;; {decimal}0"
    # These repeat after six digits, or after one and so after six
    elif q in (7, 9, 13) and n < q:
        same += rf";; {sign}0.\overline{{{(10**6 - 1) * n // q:06d}}}"
    edits = rf"""{frac(q if p > 0 else -q, n)} ;; {frac(-p, q)} ;; {frac(p + q, q)} ;; {p}
        {p}:{q}
        {frac(p, q + 1)} ;; {label}, {label} ;; {label} + 10^{{-30}} ;; {label}x ;; {p}/{q}/2"""
    # A rounded value is wrong: equality is exact
    for places in (1, 3, 8):
        if Fraction(f"{p / q:.{places}f}") != Fraction(p, q):
            edits += f";; {p / q:.{places}f}"
    return Case(rng.choice((label, f"${label}$", f"{p}/{q}", f"\\boxed{{{label}}}")), same, edits)


def decimal(rng: random.Random) -> Case:
    places = rng.randrange(1, 5)
    # The last digit is not 0, which could be left out
    n = rng.randrange(1, 10**5) * 10 + rng.choice((1, 2, 3, 5, 7, 9))
    text = f"{n // 10**places}.{n % 10**places:0{places}d}"
    same = rf"""{text}0 ;; \frac{{{n}}}{{{10**places}}} ;; {n}/{10**places} ;; \${text}
        {n}e-{places}
        {n} \cdot 10^{{-{places}}} ;; x={text} ;; {text}\text{{ cm}}
        {n}\times 10^{{-{places}}}"""
    edits = rf"""-{text} ;; {n} ;; {n + 1}e-{places} ;; {text}1 ;; {n}e-{places + 1} ;; {text}x
        {text}, {text} ;; {text}\times 10 ;; {text}^2"""
    return Case(text, same, edits)


def scientific(rng: random.Random) -> Case:
    m, e = rng.randrange(101, 999), rng.choice((-27, -11, -8, -4, 5, 9, 16, 23))
    text = f"{m / 100:.2f}"
    same = rf"""{text}\times 10^{{{e}}} ;; {text} \cdot 10^{{{e}}} ;; {m}e{e - 2} ;; {text}E{e}
        {text} × 10^{{{e}}} ;; {text}*10^{{{e}}} ;; \frac{{{m}}}{{100}} 10^{{{e}}}
        {text}\times 10^{{{e}}} \text{{ m}}
        {m * 10 ** (e - 2) if e > 2 else f"0.{'0' * (-e - 1)}{m}"}"""
    edits = rf"""{text}\times 10^{{{e + 1}}} ;; {(m + 1) / 100:.2f}e{e} ;; -{text}e{e}
        {text}e{-e}
        0 ;; {text} ;; {m}e{e}"""
    return Case(f"{text}e{e}", same, edits)


def radical(rng: random.Random) -> Case:
    a, b = rng.choice([a for a in range(-9, 10) if a]), rng.randrange(2, 8)
    c, d = rng.choice((3, 5, 7, 11, 13)), rng.randrange(2, 6)
    # With b = c the edit that swaps them would have the same value
    b = b + 1 if b == c else b
    label, value = rf"\frac{{{a}+{b}\sqrt{{{c}}}}}{{{d}}}", (a + b * math.sqrt(c)) / d
    same = rf"""({a}+{b}\sqrt{{{c}}})/{d} ;; ({a}+\sqrt{{{b * b * c}}})/{d} ;; ({a}+{b}√{c})/{d}
        \frac{{{a}}}{{{d}}}+\frac{{{b}\sqrt{{{c}}}}}{{{d}}}
        \frac{{{a}+{b}\cdot {c}^{{1/2}}}}{{{d}}}
        ({a}+{b}sqrt({c}))/{d} ;; x={label}
        \frac{{{b * c}}}{{{d}\sqrt{{{c}}}}}+\frac{{{a}}}{{{d}}}
        \frac{{{a * a - b * b * c}}}{{{d}({a}-{b}\sqrt{{{c}}})}}
        \frac{{{b}\sqrt {c}{a:+d}}}{d}"""
    edits = rf"""\frac{{{a}-{b}\sqrt{{{c}}}}}{{{d}}} ;; \frac{{{a}+{c}\sqrt{{{b}}}}}{{{d}}}
        {label}i
        \frac{{{a}+{b}\sqrt[3]{{{c}}}}}{{{d}}} ;; {a}+{b}\sqrt{{{c}}} ;; {value:.4f} ;; {value:.12f}
        \frac{{{a}\pm {b}\sqrt{{{c}}}}}{{{d}}} ;; \frac{{{a}+{b}\sqrt{{{c + 1}}}}}{{{d}}}
        {label}+10^{{-25}}"""
    return Case(label, same, edits)


def with_pi(rng: random.Random) -> Case:
    (p, q), a = rng.choice(((1, 6), (5, 4), (7, 3), (20, 1), (3, 2), (40, 3))), rng.randrange(1, 9)
    share, value = frac(p, q) if q > 1 else str(p), a + p * math.pi / q
    same = rf"""{a}+\frac{{{p}\pi}}{{{q}}} ;; {a}+{p}\pi/{q} ;; {share}π+{a} ;; {a}+{p}π/{q}
        {a}+\frac{{\pi}}{{{q}}}\cdot {p} ;; {a}+\frac{{{p * 2}}}{{{q * 2}}}\pi ;; r={a}+{share}\pi
        {a}+{p}\arccos(-1)/{q} ;; {a}+{p * 2}\arcsin(1)/{q}"""
    # Decimals and 22/7 are near pi and are not pi
    edits = rf"""{a}+{share} ;; {a}-{share}\pi ;; {value:.2f} ;; {value:.14f} ;; {a}+{share}\pi^2
        {a}+\frac{{{p * 22}}}{{{q * 7}}} ;; {a}+{frac(p + 1, q)}\pi ;; {a}+{share}\pi x
        {a + 1}+{share}\pi"""
    return Case(rf"{a}+{share}\pi", same, edits)


def big(rng: random.Random) -> Case:
    base, n, f = rng.choice((2, 3, 5, 6)), rng.randrange(40, 400), rng.randrange(10, 60)
    same = rf"""{base}^{{{n - 3}}} \cdot {base**3} \cdot {f}!
        {f}\cdot {f - 1}! \cdot {base}^{{{n}}}
        {base * base}^{{{n // 2}}} \cdot {base ** (n % 2)} \times {f}! ;; {base}^{n} \cdot {f}!
        \frac{{{f + 1}!}}{{{f + 1}}} {base}^{{{n}}} ;; {base}^{{{n}}}\cdot {math.factorial(f)}"""
    # Numbers of up to 400 digits, of which float64 cannot tell n from n + 1
    edits = rf"""{base}^{{{n - 1}}} \cdot {f}! ;; {base}^{{{n}}} \cdot {f + 1}! ;; {base}^{{{n}}}
        {f}!
        {base}^{{{n}}} \cdot {f}! + 1 ;; \frac{{{f}!}}{{{base}^{{{n}}}}}
        -{base}^{{{n}}} \cdot {f}!"""
    return Case(rf"{base}^{{{n}}} \cdot {f}!", same, edits)


def quantity(rng: random.Random) -> Case:
    n, (unit, long, other) = rng.randrange(2, 400), rng.choice((
        ("cm", "centimeters", "m"), ("km", "kilometers", "cm"), ("inches", "in", "feet"),
        ("kg", "kilograms", "g"), ("hours", "hrs", "minutes"),
    ))  # fmt: skip
    word, power = rng.choice((("", ""), ("square ", "^2"), ("cubic ", "^{3}")))
    same = rf"""{n} ;; {n}\text{{ {unit}}}{power} ;; {n}\,\mathrm{{{unit}}}{power}
        {n}\mbox{{ {long}}}{power} ;; {n}.0 \text{{ {word}{long}}}
        x = {n} \text{{ {unit}}}{power}
        {n * 3}/3\ \text{{{unit}}}{power}"""
    # Units are never converted
    edits = rf"""{n}\text{{ {other}}}{power} ;; {n + 1}\text{{ {unit}}}{power} ;; {n + 1} ;; -{n}
        {n}\text{{ {unit}}}^4 ;; {n} \% ;; {n}^\circ ;; {n} x"""
    return Case(rf"{n}\text{{ {unit}}}{power}", same, edits)


def angle_percent_money(rng: random.Random) -> Case:
    # Not 90, because 180 - n is an edit
    n, c = rng.choice([n for n in range(3, 178) if n != 90]), rng.randrange(10, 100)
    # The same angle in radians is wrong: no unit is converted
    case = rng.choice((
        (rf"{n}^\circ",
         rf"{n} ;; {n}^{{\circ}} ;; {n}° ;; {n}\text{{ degrees}} ;; \angle A = {n}^\circ",
         rf"{n + 1}^\circ ;; {180 - n}^\circ ;; \frac{{{n}\pi}}{{180}} ;; {n}\text{{ m}} ;; -{n}°"),
        (rf"{n}\%",
         rf"{n}% ;; {n} \% ;; {frac(n, 100)} ;; {n / 100:.2f} ;; {n}.0\% ;; {n}\text{{ percent}}",
         rf"{n + 1}\% ;; {n}0\% ;; {n / 1000:.3f} ;; {n}\text{{ cm}} ;; -{n}\% ;; {n / 10:.1f}\%"),
        (rf"\${n}.{c}", rf"{n}.{c} ;; \${n}.{c}0 ;; {n}.{c}\text{{ dollars}} ;; $\${n}.{c}$",
         rf"\${n}.{c}1 ;; {n}.{c}\text{{ cents}} ;; \${n} ;; -\${n}.{c} ;; €{n}.{c}"),
    ))  # fmt: skip
    return Case(*case)


def tuples(rng: random.Random) -> Case:
    # Without repetition, or swapping two would change nothing
    values = rng.sample(range(-30, 300), rng.randrange(2, 5))
    a, b, *rest = text = [str(v) for v in values]
    inner, loose = ",".join(text), ",\\ ".join(text)
    same = rf"""({", ".join(text)}) ;; \left({inner}\right)
        ({",".join(f"{v}.0" for v in values)})
        ({"; ".join(text)}) ;; ({",".join(frac(2 * v, 2) for v in values)}) ;; \big({loose}\big)
        ({",".join("xyzw"[: len(text)])})=({inner})"""
    edits = rf"""({",".join([b, a, *rest])}) ;; ({",".join(text[:-1])}) ;; ({inner},0)
        [{inner}] ;; ({inner}]
        \{{{inner}\}} ;; ({",".join([str(values[0] + 1), b, *rest])})
        {"".join(text).replace("-", "")}
        ({inner}),({inner}) ;; {a}"""
    return Case(f"({inner})", same, edits)


def lists(rng: random.Random) -> Case:
    values = rng.sample(range(-20, 60), rng.randrange(2, 6))
    text = [str(v) for v in values]
    mixed = rng.sample(text, len(text))
    a_or_b, a_and_b = " \\text{ or } ".join(f"x={v}" for v in mixed), " \\text{ and } ".join(mixed)
    same = rf"""{", ".join(mixed)} ;; \{{{",".join(mixed)}\}} ;; {",".join(f"{v}.0" for v in mixed)}
        {a_or_b} ;; {a_and_b} ;; ${"$,$".join(text)}$ ;; x = {", ".join(text)} ;; {"; ".join(text)}
        {", ".join(f"x_{{{k}}}={v}" for k, v in enumerate(mixed))}"""
    edits = rf"""{",".join([str(values[0] + 100), *text[1:]])} ;; {",".join(text[1:])}
        {",".join(text)},77
        {",".join(text)},{text[0]} ;; {text[0]} ;; [{",".join(text)}]"""
    return Case(",".join(text), same, edits)


def tuple_lists(rng: random.Random) -> Case:
    # a < b in every pair, so a swapped pair is a new one
    pairs = [(a, b) for a in range(-5, 6) for b in range(6, 12)]
    (a, b), *rest = chosen = rng.sample(pairs, rng.randrange(2, 7))
    text, rest = [f"({x},{y})" for x, y in chosen], "".join(f",({x},{y})" for x, y in rest)
    mixed = rng.sample(text, len(text))
    joined = " \\text{ and } ".join(mixed)
    same = rf"{', '.join(mixed)} ;; \{{{','.join(mixed)}\}} ;; ${'$, $'.join(mixed)}$ ;; {joined}"
    edits = rf"""{",".join(mixed[1:])} ;; ({b},{a}){rest} ;; ({a},{b + 20}){rest} ;; [{a},{b}]{rest}
        {",".join(text)},(9,1)"""
    return Case(",".join(text), same, edits)


def plus_minus(rng: random.Random) -> Case:
    a, c = rng.randrange(1, 9), rng.choice((2, 3, 5, 19))
    high, low = rf"{a}+\sqrt{{{c}}}", rf"{a}-\sqrt{{{c}}}"
    same = rf"""{a} \pm \sqrt{{{c}}} ;; {low}, {high} ;; \{{{high},{low}\}} ;; {a}±√{c}
        x={a}\mp\sqrt{{{c}}} ;; \frac{{{2 * a}\pm 2\sqrt{{{c}}}}}{{2}}
        x={low} \text{{ or }} x={high}"""
    edits = rf"""{high} ;; {low} ;; {a}\pm\sqrt{{{c + 1}}} ;; {high},{high} ;; {high},{low},{a}
        -{a}\pm\sqrt{{{c}}} ;; \pm({high})"""
    return Case(rng.choice((rf"{a} \pm \sqrt{{{c}}}", f"{high},{low}")), same, edits)


def interval(rng: random.Random) -> Case:
    a = rng.randrange(-20, 20)
    b, left, right = a + rng.randrange(1, 30), rng.choice("(["), rng.choice(")]")
    below, above = "<" if left == "(" else "\\le", "<" if right == ")" else "\\leq"
    flip = {"(": "[", "[": "(", ")": "]", "]": ")"}
    same = rf"""{left}{a}, {b}{right} ;; \left{left}{a},{b}\right{right}
        x \in {left}{a},{b}{right}
        {a} {below} x {above} {b} ;; {left}{a}.0,\frac{{{2 * b}}}{{2}}{right}"""
    edits = rf"""{flip[left]}{a},{b}{right} ;; {left}{a},{b}{flip[right]}
        {left}{a},{b + 1}{right}
        {left}{a - 1},{b}{right} ;; {left}{a},\infty) ;; {a} ;; \{{{a},{b}\}} ;; x {above} {b}
        {left}{b},{a}{right} ;; {left}{a},{b}{right} \cup [{b + 2},{b + 3}]"""
    return Case(f"{left}{a},{b}{right}", same, edits)


def rays(rng: random.Random) -> Case:
    a = rng.randrange(-20, 20)
    b = a + rng.randrange(1, 30)
    outside = rf"(-\infty,{a})\cup({b},\infty)"
    case = rng.choice((
        (rf"[{a},\infty)",
         rf"x \ge {a} ;; x >= {a} ;; {a} \le x ;; [{a}, ∞) ;; [{a},+\infty) ;; x≥{a} ;; [{a},oo)",
         rf"x > {a} ;; x \le {a} ;; ({a},\infty) ;; [{a + 1},\infty) ;; {a} ;; [{a},{b}]"),
        (outside,
         rf"""({b},\infty)\cup(-\infty,{a}) ;; x<{a} \text{{ or }} x>{b} ;; (-∞,{a})∪({b},∞)
         \mathbb{{R}}\setminus[{a},{b}]""",
         rf"""(-\infty,{a}]\cup({b},\infty) ;; ({a},{b}) ;; (-\infty,{a})
        (-\infty,{a})\cup[{b},\infty)
         (-\infty,{b})\cup({a},\infty) ;; (-\infty,{a})\cup({b + 1},\infty)"""),
        (rf"(-\infty,{a})\cup({a},\infty)",
         rf"x \ne {a} ;; \mathbb{{R}} \setminus \{{{a}\}} ;; x<{a} \text{{ or }} x>{a}",
         rf"\mathbb{{R}} ;; x \ne {a + 1} ;; (-\infty,\infty) ;; x={a}"),
        (rf"k \geqslant {a}", rf"k \ge {a} ;; [{a},\infty) ;; {a} \leqslant k",
         rf"n \ge {a} ;; k > {a} ;; k \le {a} ;; {a}"),
    ))  # fmt: skip
    return Case(*case)


def polynomial(rng: random.Random) -> Case:
    roots, name = rng.sample(range(-7, 8), rng.choice((2, 3))), rng.choice("xtnk")
    c = expanded(roots)
    shown, product = poly(c, name), factored(roots, name)
    ascending = "+".join(f"({v}){name}^{{{k}}}" for k, v in enumerate(c))
    spaced = shown.replace("+", " + ").replace("-", " - ")
    same = rf"""{shown} ;; {product} ;; {ascending} ;; {factored(roots[::-1], name)} ;; y={product}
        f({name}) = {shown} ;; \frac{{2{product}}}{{2}} ;; {spaced}"""
    edits = rf"""{poly([c[0] + 1, *c[1:]], name)} ;; {poly([-v for v in c], name)} ;; {poly(c, "y")}
        {factored([roots[0] + 1, *roots[1:]], name)} ;; {product}{name} ;; 2{product}
        {shown} + 10^{{-30}}"""
    return Case(rng.choice((shown, product, f"${shown}$")), same, edits)


# Three lines each: a label, its rewrites, its edits
FORMULAS = r"""
\frac{n(n+1)}{2}
    \frac{n^2+n}{2} ;; n(n+1)/2 ;; \binom{n+1}{2} ;; \frac12 n(n+1) ;; 0.5n^2+\frac n2 ;; (n+1)n/2
    \frac{n(n-1)}{2} ;; n(n+1) ;; \frac{m(m+1)}{2} ;; \frac{n^2+1}{2} ;; \binom{n}{2}
\binom{2n}{n}
    \frac{(2n)!}{n!^2} ;; \dbinom{2n}{n} ;; \frac{(2n)!}{n! n!}
    \binom{2n}{n+1} ;; \binom{n}{2} ;; \frac{(2n)!}{n!} ;; 2^n
2^{n}-n-1
    2^n-(n+1) ;; -1-n+2^{n} ;; 2\cdot 2^{n-1}-n-1
    2^n-n+1 ;; 2^{n+1}-n-1 ;; 2^n ;; n^2-n-1
m n-\lfloor m / 2\rfloor
    nm - \left\lfloor \frac{m}{2} \right\rfloor ;; mn-⌊m/2⌋
    mn-\lceil m/2\rceil ;; mn-m/2 ;; mn ;; mn-\lfloor n/2\rfloor
\lfloor\sqrt{n+3}\rfloor
    \left\lfloor \sqrt{3+n} \right\rfloor ;; ⌊√(n+3)⌋
    \lfloor\sqrt{n+2}\rfloor ;; \lfloor\sqrt{m+3}\rfloor ;; \sqrt{n+3} ;; \lceil\sqrt{n+3}\rceil
\frac{1}{2a}(e^{at}-e^{-at})
    \frac{\sinh(at)}{a} ;; \frac{e^{a t}-e^{-a t}}{2 a} ;; \frac{1}{2a}(\exp(at)-\exp(-at))
    \frac{1}{2a}(e^{at}+e^{-at}) ;; \frac{\cosh(at)}{a} ;; \frac{1}{2}(e^{at}-e^{-at})
C_{1} \cos (2 t)+C_{2} \sin (2 t)
    C_2\sin 2t + C_1\cos 2t ;; C_1\cos(2t)+C_2\sin(2t)
    C_1\cos 2t + C_1 \sin 2t ;; C_{2} \cos (2 t)+C_{1} \sin (2 t) ;; \cos 2t+\sin 2t
\sqrt{2} \cos (2 t-\pi / 4)
    \cos(2t)+\sin(2t) ;; \sqrt2\cos(2t-\frac{\pi}{4})
    \sqrt{2} \cos (2 t+\pi / 4) ;; \cos(2t)-\sin(2t) ;; 2\cos(2t-\pi/4)
\frac{a M^{1 / 3}}{G M^{2 / 3}+b}
    \frac{a\sqrt[3]{M}}{b+G M^{2/3}} ;; \dfrac{aM^{1/3}}{G M^{2/3}+b}
    \frac{a M^{1/3}}{G M^{2/3}-b} ;; \frac{a M}{GM+b} ;; \frac{a M^{1/3}}{G M^{1/3}+b}
\frac{\log 2}{\log 2-\log 3}
    \frac{\ln 2}{\ln 2-\ln 3} ;; \frac{\ln 2}{\ln(2/3)} ;; \log_{2/3} 2
    \frac{\log 3}{\log 2-\log 3} ;; -1.7095 ;; \frac{\ln 2}{\ln 3-\ln 2}
\lim_{t \to 0} v^{\prime\prime}(t)
    $\lim_{t \to 0} v^{\prime\prime}(t)$
    \lim_{t \to 1} v^{\prime\prime}(t) ;; 0 ;; \lim_{t \to 0} v^{\prime}(t) ;; v
"""


def formula(rng: random.Random) -> Case:
    lines = FORMULAS.strip().split("\n")
    k = 3 * rng.randrange(len(lines) // 3)
    return Case(lines[k], lines[k + 1], lines[k + 2])


def assignment(rng: random.Random) -> Case:
    m, c, k = rng.randrange(2, 9), rng.randrange(1, 9), rng.randrange(2, 5)
    if rng.random() < 0.5:
        same = f"{m}x+{c} ;; f(x)={c}+{m}x ;; f(x) = {k * m}x/{k} + {c} ;; f(t)={m}t+{c}"
        # Only the argument may have another name, not the function
        edits = f"f(x)={m}x ;; g(x)={m}x+{c} ;; {m}x-{c} ;; f(x)={m}x+{c}, f(x)=x ;; f(t)={m}x+{c}"
        return Case(f"f(x)={m} x+{c}", same, edits)
    same = rf"""{m}x+{c} ;; y={c}+{m}x ;; {m}x - y + {c} = 0 ;; {k}y = {k * m}x + {k * c}
        y = {m}(x+\frac{{{c}}}{{{m}}})"""
    edits = f"""{m}x-{c} ;; y={m + 1}x+{c} ;; z = {m}x+{c} ;; x = {m}y+{c} ;; {m}x + y + {c} = 0
        y={c} ;; {m}t+{c} ;; y=y"""
    return Case(f"y = {m}x + {c}", same, edits)


def equation(rng: random.Random) -> Case:
    a, b, c = rng.randrange(2, 20), rng.randrange(20, 40), rng.randrange(1, 9)
    same = rf"""{2 * a}x - {2 * b}y + {2 * c} = 0 ;; {a}x + {c} = {b}y ;; -{a}x+{b}y-{c}=0
        {b}y-{a}x = {c} ;; y=\frac{{{a}x+{c}}}{{{b}}}"""
    edits = rf"""{a}x - {b}y - {c} = 0 ;; {a}x + {b}y + {c} = 0 ;; {a}x-{b}y+{c} ;; 0=0
        {a}x - {b}y + {c} = 1 ;; {a + 1}x - {b}y + {c} = 0 ;; {a}x - {b}z + {c} = 0
        {a}x - {b}y + {c} \ge 0"""
    return Case(f"{a}x - {b}y + {c} = 0", same, edits)


def matrix(rng: random.Random) -> Case:
    # b and c come from ranges that do not overlap, so the transpose is another matrix
    a, b, c, d = rng.randrange(1, 9), rng.randrange(-9, 0), rng.randrange(10, 20), rng.randrange(9)

    def show(rows, kind="pmatrix"):
        cells = " \\\\ ".join(" & ".join(map(str, row)) for row in rows)
        return f"\\begin{{{kind}}} {cells} \\end{{{kind}}}"

    rows = [[a, b], [c, d]]
    doubled, halves = (
        [[f(x) for x in row] for row in rows] for f in ((2).__mul__, lambda x: frac(2 * x, 2))
    )
    same = rf"""{show(rows, "bmatrix")} ;; {show(rows).replace(" ", "")}
        \frac{{1}}{{2}}{show(doubled)}
        A = {show(rows)} ;; {show(halves)}"""
    edits = rf"""{show([[a, c], [b, d]])} ;; {show([[a + 1, b], [c, d]])} ;; {show([[a, b]])}
        {show([[a], [c]])} ;; {show(doubled)} ;; -{show(rows)} ;; ({a},{b},{c},{d})"""
    return Case(show(rows), same, edits)


def complex_number(rng: random.Random) -> Case:
    a, b = rng.sample(range(1, 10), 2)
    if rng.random() < 0.5:
        label = f"{a * a - b * b}{2 * a * b:+d}i"
        same = (
            f"({a}+{b}i)^2 ;; {2 * a * b}i+{a * a - b * b} ;; -({b}-{a}i)^2 ;; ({a}+{b}i)({a}+{b}i)"
        )
        edits = (
            f"({a}-{b}i)^2 ;; {a * a - b * b} ;; {2 * a * b}i ;; ({a}+{b}i)^3 ;; {a * a + b * b}"
        )
        return Case(label, same, edits)
    same = rf"-{b}i+{a} ;; {a}-{b}\mathrm{{i}} ;; z={a}-{b}i ;; \frac{{{2 * a}-{2 * b}i}}{{2}}"
    edits = f"{a}+{b}i ;; -{a}-{b}i ;; {b}-{a}i ;; {a}-{b} ;; ({a},-{b}) ;; {a}-{b}x"
    return Case(f"{a}-{b}i", same, edits)


def in_base(rng: random.Random) -> Case:
    base = rng.randrange(4, 10)
    # The last digit is larger than the first, so the reversed number is another
    digits = f"{rng.randrange(1, base - 1)}{rng.randrange(base)}{base - 1}"
    same = rf"{digits}_{{{base}}} ;; ({digits})_{base} ;; N = {digits}_{base} ;; 0{digits}_{base}"
    edits = rf"""{digits}_{{{base + 1}}} ;; {digits}1_{base} ;; {digits} ;; {digits}_{{10}}
        {digits[::-1]}_{base}"""
    return Case(f"{digits}_{base}", same, edits)


def words(rng: random.Random) -> Case:
    word, other = rng.sample(("west", "even", "ellipse", "Evelyn", "monday", "increasing"), 2)
    a, b = rng.sample("ABCDE", 2)
    if rng.random() < 0.5:
        same = rf"""{word} ;; \text{{{word.upper()}}} ;; \textbf{{{word}}} ;; \mathrm{{{word}}}
            {word}."""
        edits = rf"""{other} ;; \text{{{other}}} ;; \text{{not {word}}}
        \text{{{word} or {other}}}
            {word[::-1]} ;; {word[:-1]}"""
        return Case(rf"\text{{{word}}}", same, edits)
    same = rf"{a} ;; ({a}) ;; \textbf{{{a}}} ;; \text{{({a.lower()})}} ;; \mathrm{{({a})}}"
    edits = rf"{b} ;; ({b}) ;; {a}, {b} ;; {a} \text{{ or }} {b} ;; {a}{b}"
    return Case(rf"\text{{({a})}}", same, edits)


def ratio(rng: random.Random) -> Case:
    a, b = rng.choice(((3, 4), (5, 7), (2, 9), (1, 6)))
    return Case(
        f"{a}:{b}",
        f"{a} : {b} ;; {2 * a}:{2 * b}",
        f"{b}:{a} ;; {a}:{b + 1} ;; {a}:{b}:1 ;; {a},{b}",
    )


# The box in the thought of the first one must not count
WRAPS = (
    "<think>\nSo we get \\boxed{{0}} at first.\n</think>\n\nTherefore \\boxed{{{}}}.",
    "We compute.\n</think>\n\n$$\\boxed{{{}}}$$",
    "Thus the answer is \\(\\boxed{{{}}}\\). Let me know if you need more detail!",
    "<think>x</think>\n**Answer:**\n\\[\n\\boxed {{{}}}\n\\]<|im_end|>",
)


# The order is part of the pairs: each recipe draws from one stream of random numbers
RECIPES = (
    integer, fraction, decimal, scientific, radical, with_pi, big, quantity, angle_percent_money,
    tuples, lists, tuple_lists, plus_minus, interval, rays, polynomial, formula, assignment,
    equation, matrix, complex_number, in_base, words, ratio,
)  # fmt: skip


def pairs(count: int, seed: int = 0) -> list[Pair]:
    """At least `count` different (response, label, expected, answer), all recipes in turn."""
    rng, out = random.Random(seed), {}
    while len(out) < count:
        for make in RECIPES:
            label, same, edits = make(rng)
            for answers, expected in (([label, *texts(same)], True), (texts(edits), False)):
                for answer in answers:
                    out[Pair(rng.choice(WRAPS).format(answer), label, expected, answer)] = None
    return list(out)
