"""Pairs of (label, answer, same?) for the verifier: an oracle that is right by construction.

Labels come from recipes that know their value (two integers, the roots of a polynomial, the ends of
an interval), so that every rewrite and every edit is written from the value and not from the text.
Shapes follow what real label files contain; the labels themselves are our own.
"""

import math
import random
from fractions import Fraction

SCALES = ("cm", "m", "km", "inches", "feet", "hours", "kg")


def recipe(function):
    RECIPES.append(function)
    return function


RECIPES = []


def frac(p, q, command="\\frac"):
    return f"{'-' if p < 0 else ''}{command}{{{abs(p)}}}{{{q}}}"


def grouped(n, separator):
    return f"{n:,}".replace(",", separator)


def poly(coefficients, name="x"):
    """[c0, c1, c2] -> c2 x^2 + c1 x + c0"""
    terms = []
    for power in reversed(range(len(coefficients))):
        c = coefficients[power]
        if c:
            unknown = "" if power == 0 else name if power == 1 else f"{name}^{{{power}}}"
            number = str(abs(c)) if abs(c) != 1 or not unknown else ""
            terms.append((" - " if c < 0 else " + ") + number + unknown)
    return "".join(terms).removeprefix(" + ").replace(" - ", "-", 1 if terms[0][1] == "-" else 0)


def expanded(roots):
    out = [1]
    for root in roots:
        out = [
            (out[k - 1] if k else 0) - root * (out[k] if k < len(out) else 0)
            for k in range(len(out) + 1)
        ]
    return out


def factored(roots, name="x"):
    return "".join(f"({name}{-root:+d})" if root else name for root in roots)


@recipe
def integer(rng):
    n = rng.choice((rng.randrange(2, 1000), rng.randrange(10**4, 10**9), -rng.randrange(2, 500)))
    k = rng.randrange(2, 9)
    same = [f"{n}.0", f"{n}.", f"{n * k}/{k}", frac(n * k, k), f"x = {n}", f"{n + k} - {k}",
            f"f({k})={n}",
            f"{n}\\text{{ {rng.choice(SCALES)}}}", f"\\mathbf{{{n}}}", f"\\left({n}\\right)",
            f"${n}$",
            f"{n * k}/{k} = {n}", f"a+b = {n}", f"{n}\\,", f"\\text{{{n}}}"]  # fmt: skip
    if n > 0:
        same += [f"0{n}", f"+{n}", f"\\sqrt{{{n * n}}}", f"|{-n}|", f"\\lfloor {n}.5 \\rfloor"]
    else:
        same += [f"−{-n}", f"-\\frac{{{-n * k}}}{{{k}}}"]
    if n > 9999:
        same += [grouped(n, mark) for mark in (",", "{,}", "\\,", ",\\!", "\\;")]
    edits = [f"{n + 1}", f"{n - 1}", f"{-n}", f"{n}0", f"{n}.5", f"{n}, {n + 1}",
             f"{n} \\text{{ or }} {n + k}",
             f"\\pm {n}", f"x \\ne {n}", f"[{n - 1}, {n + 1}]", f"{n - 1} = {n}",
             f"x = {n - 1} = {n}", f"{n}^2",
             f"x^2 = {n}", f"{n}x", f"\\text{{not }} {n}", f"\\approx {n}",
             f"{n} \\text{{ to }} {n + k}",
             f"{n}i", f"{n} {k}", f"{n}\\ldots",
             f"{n}+10^{{-40}}", f"{n}.0000001", f"\\frac{{{n}}}{{0}}", f"{n}_7",
             f"({n}, {n})"]  # fmt: skip
    return rng.choice((f"{n}", f"${n}$", f"\\boxed{{{n}}}", f"{n}.")), same, edits


@recipe
def fraction(rng):
    q = rng.choice((2, 4, 5, 7, 8, 9, 12, 13, 16, 25, 101))
    p = rng.choice([p for p in range(1, 60) if math.gcd(p, q) == 1]) * rng.choice((1, 1, -1))
    k, sign = rng.randrange(2, 9), "-" if p < 0 else ""
    same = [frac(p, q), frac(p, q, "\\dfrac"), frac(p, q, "\\tfrac"), f"{p}/{q}",
            f"\\frac{{{p}}}{{{q}}}",
            frac(p * k, q * k), f"{p} \\div {q}", f"\\frac{{{-p}}}{{{-q}}}",
            f"{p}\\cdot\\frac{{1}}{{{q}}}",
            f"x={frac(p, q)}", f"{frac(p * k, q * k)} = {frac(p, q)}", f"{p}\\cdot {q}^{{-1}}",
            f"{{{p} \\over {q}}}"]  # fmt: skip
    if abs(p) > q:
        whole, rest = divmod(abs(p), q)
        same += [f"{sign}{whole}\\frac{{{rest}}}{{{q}}}", f"{sign}{whole} {rest}/{q}"]
    if q < 10:
        same += [f"{sign}\\frac{{{abs(p)}}}{q}"]
    if abs(p) < 10 and q < 10:
        same += [f"{sign}\\frac{abs(p)}{q}", f"{sign}\\frac {abs(p)}{q}"]
    exact = f"{p / q:.12f}".rstrip("0")
    if Fraction(exact) == Fraction(p, q):
        same += [exact, exact + "0"]
    else:
        nine = (10**6 - 1) * abs(p) // q if q in (7, 9, 13) and abs(p) < q else None
        same += [f"{sign}0.\\overline{{{nine:06d}}}"] if nine else []
    edits = [
        frac(q if p > 0 else -q, abs(p)),
        frac(-p, q),
        frac(p + q, q),
        frac(p, q + 1),
        f"{p}",
        f"{p}:{q}",
    ]
    edits += [f"{p / q:.{d}f}" for d in (1, 3, 8) if Fraction(f"{p / q:.{d}f}") != Fraction(p, q)]
    edits += [
        f"{frac(p, q)}, {frac(p, q)}",
        f"{frac(p, q)} + 10^{{-30}}",
        f"{frac(p, q)}x",
        f"{p}/{q}/2",
    ]
    return (
        rng.choice((frac(p, q), f"${frac(p, q)}$", f"{p}/{q}", f"\\boxed{{{frac(p, q)}}}")),
        same,
        edits,
    )


@recipe
def decimal(rng):
    places = rng.randrange(1, 5)
    n = rng.randrange(1, 10**5) * 10 + rng.choice((1, 2, 3, 5, 7, 9))
    value = Fraction(n, 10**places)
    text = f"{n // 10**places}.{n % 10**places:0{places}d}"
    same = [text + "0", frac(value.numerator, value.denominator), f"{n}/{10**places}",
            f"\\${text}", f"{n}e-{places}",
            f"{n} \\cdot 10^{{-{places}}}", f"x={text}", f"{text}\\text{{ cm}}"]  # fmt: skip
    edits = [
        f"-{text}",
        f"{n}",
        f"{n + 1}e-{places}",
        text + "1",
        f"{n}e-{places + 1}",
        f"{text}, {text}",
        f"{text}x",
    ]
    return text, same, edits


@recipe
def scientific(rng):
    m, e = rng.randrange(101, 999), rng.choice((-27, -11, -8, -4, 5, 9, 16, 23))
    text = f"{m / 100:.2f}"
    same = [f"{text}\\times 10^{{{e}}}", f"{text} \\cdot 10^{{{e}}}", f"{m}e{e - 2}",
            f"{text}E{e}", f"{text} × 10^{{{e}}}",
            f"{text}*10^{{{e}}}", f"\\frac{{{m}}}{{100}} 10^{{{e}}}",
            f"{text}\\times 10^{{{e}}} \\text{{ m}}"]  # fmt: skip
    same += [f"{m * 10 ** (e - 2)}"] if e > 2 else [f"0.{'0' * (-e - 1)}{m}"]
    edits = [
        f"{text}\\times 10^{{{e + 1}}}",
        f"{(m + 1) / 100:.2f}e{e}",
        f"-{text}e{e}",
        f"{text}e{-e}",
        "0",
        f"{text}",
    ]
    return f"{text}e{e}", same, edits


@recipe
def radical(rng):
    c = rng.choice((2, 3, 5, 6, 7, 10, 11, 13))
    a, b, d = rng.randrange(-9, 10) or 4, rng.randrange(2, 8), rng.randrange(2, 6)
    top = f"{a}+{b}\\sqrt{{{c}}}"
    same = [f"\\frac{{{b}\\sqrt{{{c}}}+{a}}}{{{d}}}".replace("+-", "-"), f"({top})/{d}",
            f"({a}+\\sqrt{{{b * b * c}}})/{d}",
            f"\\frac{{{a}}}{{{d}}}+\\frac{{{b}\\sqrt{{{c}}}}}{{{d}}}",
            f"\\frac{{{a}+{b}\\cdot {c}^{{1/2}}}}{{{d}}}",
            f"({a}+{b}√{c})/{d}", f"({a}+{b}sqrt({c}))/{d}", f"x=\\frac{{{top}}}{{{d}}}",
            f"\\frac{{{b * c}}}{{{d}\\sqrt{{{c}}}}}+\\frac{{{a}}}{{{d}}}",
            f"\\frac{{{a * a - b * b * c}}}{{{d}({a}-{b}\\sqrt{{{c}}})}}"]  # fmt: skip
    value = (a + b * math.sqrt(c)) / d
    edits = [f"\\frac{{{a}-{b}\\sqrt{{{c}}}}}{{{d}}}",
             f"\\frac{{{a}+{c}\\sqrt{{{b}}}}}{{{d}}}" if b != c else "0",
             f"\\frac{{{a}+{b}\\sqrt[3]{{{c}}}}}{{{d}}}", f"{a}+{b}\\sqrt{{{c}}}", f"{value:.4f}",
             f"{value:.12f}",
             f"\\frac{{{a}\\pm {b}\\sqrt{{{c}}}}}{{{d}}}",
             f"\\frac{{{a}+{b}\\sqrt{{{c + 1}}}}}{{{d}}}",
             f"\\frac{{{top}}}{{{d}}}+10^{{-25}}", f"\\frac{{{top}}}{{{d}}}i"]  # fmt: skip
    return f"\\frac{{{top}}}{{{d}}}", same, edits


@recipe
def with_pi(rng):
    p, q = rng.choice(((1, 6), (5, 4), (7, 3), (20, 1), (3, 2), (40, 3)))
    a = rng.randrange(0, 9)
    head = f"{a}+" if a else ""
    coefficient = frac(p, q) if q > 1 else str(p)
    same = [f"{head}\\frac{{{p}\\pi}}{{{q}}}", f"{head}{p}\\pi/{q}", f"{coefficient}π+{a}",
            f"{head}{p}π/{q}",
            f"{head}\\frac{{\\pi}}{{{q}}}\\cdot {p}", f"{head}\\frac{{{p * 2}}}{{{q * 2}}}\\pi",
            f"r={head}{coefficient}\\pi",
            f"{head}{p}\\arccos(-1)/{q}", f"{head}{p * 2}\\arcsin(1)/{q}"]  # fmt: skip
    value = a + p * math.pi / q
    edits = [f"{head}{coefficient}", f"{head}-{coefficient}\\pi", f"{value:.2f}", f"{value:.14f}",
             f"{head}\\frac{{{p * 22}}}{{{q * 7}}}",
             f"{head}{frac(p + 1, q)}\\pi", f"{head}{coefficient}\\pi^2",
             f"{head}{coefficient}\\pi x", f"{a + 1}+{coefficient}\\pi"]  # fmt: skip
    return f"{head}{coefficient}\\pi", same, edits


@recipe
def big(rng):
    base, n, f = rng.choice((2, 3, 5, 6)), rng.randrange(40, 400), rng.randrange(10, 60)
    same = [f"{base}^{{{n - 3}}} \\cdot {base**3} \\cdot {f}!",
            f"{f}\\cdot {f - 1}! \\cdot {base}^{{{n}}}",
            f"{base * base}^{{{n // 2}}} \\cdot {base ** (n % 2)} \\times {f}!",
            f"\\frac{{{f + 1}!}}{{{f + 1}}} {base}^{{{n}}}",
            f"{base}^{{{n}}}\\cdot {math.factorial(f)}"]  # fmt: skip
    edits = [f"{base}^{{{n - 1}}} \\cdot {f}!", f"{base}^{{{n}}} \\cdot {f + 1}!",
             f"{base}^{{{n}}} \\cdot {f}! + 1",
             f"{base}^{{{n}}}", f"{f}!", f"\\frac{{{f}!}}{{{base}^{{{n}}}}}",
             f"-{base}^{{{n}}} \\cdot {f}!"]  # fmt: skip
    return f"{base}^{{{n}}} \\cdot {f}!", same, edits


@recipe
def quantity(rng):
    n, unit = rng.randrange(2, 400), rng.choice(("cm", "km", "kg", "inches", "hours"))
    power = rng.choice(("", "^2", "^{3}")) if unit in ("cm", "km", "inches") else ""
    other = {"cm": "m", "km": "cm", "kg": "g", "inches": "feet", "hours": "minutes"}[unit]
    long = {
        "cm": "centimeters",
        "km": "kilometers",
        "kg": "kilograms",
        "inches": "in",
        "hours": "hrs",
    }[unit]
    word = {"": "", "^2": "square ", "^{3}": "cubic "}[power]
    same = [f"{n}", f"{n}\\text{{ {unit}}}{power}", f"{n}\\,\\mathrm{{{unit}}}{power}",
            f"{n}\\mbox{{ {long}}}{power}",
            f"{n}.0 \\text{{ {word}{long}}}", f"x = {n} \\text{{ {unit}}}{power}",
            f"{n * 3}/3\\ \\text{{{unit}}}{power}"]  # fmt: skip
    edits = [f"{n}\\text{{ {other}}}{power}", f"{n + 1}\\text{{ {unit}}}{power}", f"{n + 1}",
             f"-{n}", f"{n}\\text{{ {unit}}}^4",
             f"{n} \\%", f"{n}^\\circ", f"{n} x"]  # fmt: skip
    return f"{n}\\text{{ {unit}}}{power}", same, edits


@recipe
def angle_percent_money(rng):
    n = rng.randrange(3, 178)
    cents = f"{n}.{rng.randrange(10, 99)}"
    label, same, edits = rng.choice((
        (f"{n}^\\circ", [f"{n}", f"{n}^{{\\circ}}", f"{n}°", f"{n}\\text{{ degrees}}",
                         f"{n * 2}/2^\\circ", f"\\angle A = {n}^\\circ"],
         [f"{n + 1}^\\circ", f"{180 - n}^\\circ" if n != 90 else "91", f"\\frac{{{n}\\pi}}{{180}}",
          f"{n}\\text{{ cm}}", f"-{n}^\\circ"]),
        (f"{n}\\%", [f"{n}%", f"{n} \\%", frac(n, 100), f"{n / 100:.2f}", f"{n}.0\\%",
                     f"{n}\\text{{ percent}}"],
         [f"{n + 1}\\%", f"{n}0\\%", f"{n / 1000:.3f}", f"{n}\\text{{ cm}}", f"-{n}\\%",
          f"{n / 10:.1f}\\%"]),
        (f"\\${cents}", [cents, f"\\${cents}0", f"{cents}\\text{{ dollars}}", f"$\\${cents}$"],
         [f"\\${cents}1", f"{cents}\\text{{ cents}}", f"\\${n}", f"-\\${cents}", f"€{cents}"]),
    ))  # fmt: skip
    return label, same, edits


@recipe
def tuples(rng):
    values = rng.sample(range(-30, 300), rng.randrange(2, 5))
    text = [str(v) for v in values]
    swapped = [text[1], text[0], *text[2:]]
    same = [f"({', '.join(text)})", f"\\left({','.join(text)}\\right)",
            f"({','.join(t + '.0' for t in text)})",
            f"(a,b)=({','.join(text)})" if len(text) == 2 else f"({'; '.join(text)})",
            f"({','.join(frac(2 * v, 2) for v in values)})",
            "\\big(" + ",\\ ".join(text) + "\\big)"]  # fmt: skip
    edits = [f"({','.join(swapped)})", f"({','.join(text[:-1])})", f"({','.join(text)},0)",
             f"[{','.join(text)}]",
             f"({','.join(text)}]", "\\{" + ",".join(text) + "\\}",
             f"({','.join([str(values[0] + 1), *text[1:]])})",
             "".join(text).replace("-", ""), f"({','.join(text)}),({','.join(text)})",
             text[0]]  # fmt: skip
    return f"({','.join(text)})", same, edits


@recipe
def lists(rng):
    values = rng.sample(range(-20, 60), rng.randrange(2, 6))
    mixed, text = rng.sample(values, len(values)), [str(v) for v in values]
    same = [", ".join(map(str, mixed)), "\\{" + ",".join(map(str, mixed)) + "\\}",
            ",".join(f"{v}.0" for v in mixed),
            " \\text{ or } ".join(f"x={v}" for v in mixed), " \\text{ and } ".join(map(str,
                                                                                       mixed)),
                                                                                       "$" + "$,$".join(text) + "$",
            f"x = {', '.join(text)}", ", ".join(f"x_{{{k}}}={v}" for k, v in enumerate(mixed)),
            "; ".join(text)]  # fmt: skip
    changed = [str(values[0] + 1), *text[1:]]
    changed = changed if values[0] + 1 not in values else [str(values[0] + 100), *text[1:]]
    edits = [
        ",".join(changed),
        ",".join(text[1:]),
        ",".join([*text, "77"]),
        ",".join([*text, text[0]]),
        text[0],
        f"[{','.join(text)}]",
    ]
    return ",".join(text), same, edits


@recipe
def tuple_lists(rng):
    pairs = rng.sample(
        [(a, b) for a in range(-5, 6) for b in range(1, 9) if a != b], rng.randrange(2, 7)
    )
    text = [f"({a},{b})" for a, b in pairs]
    mixed = rng.sample(text, len(text))
    same = [
        ", ".join(mixed),
        "\\{" + ",".join(mixed) + "\\}",
        "$" + "$, $".join(mixed) + "$",
        " \\text{ and } ".join(mixed),
    ]
    (a, b), *_ = pairs
    edits = [",".join(mixed[1:]), ",".join([f"({b},{a})", *text[1:]]) if (b,
                                                                          a) not in pairs else text[0],
             ",".join([*text, "(9,9)"]), ",".join([f"({a},{b + 20})", *text[1:]]),
             ",".join([f"[{a},{b}]", *text[1:]])]  # fmt: skip
    return ",".join(text), same, edits


@recipe
def plus_minus(rng):
    a, c = rng.randrange(1, 9), rng.choice((2, 3, 5, 19))
    high, low = f"{a}+\\sqrt{{{c}}}", f"{a}-\\sqrt{{{c}}}"
    same = [f"{a} \\pm \\sqrt{{{c}}}", f"{low}, {high}", f"\\{{{high},{low}\\}}", f"{a}±√{c}",
            f"x={a}\\mp\\sqrt{c}",
            f"\\frac{{{2 * a}\\pm 2\\sqrt{{{c}}}}}{{2}}",
            f"x={low} \\text{{ or }} x={high}"]  # fmt: skip
    edits = [high, low, f"{a}\\pm\\sqrt{{{c + 1}}}", f"{high},{high}", f"{high},{low},{a}",
             f"-{a}\\pm\\sqrt{{{c}}}",
             f"\\pm({high})", f"({low},{high})"]  # fmt: skip
    return rng.choice((f"{a} \\pm \\sqrt{{{c}}}", f"{high},{low}")), same, edits[:-1]


@recipe
def interval(rng):
    a = rng.randrange(-20, 20)
    b = a + rng.randrange(1, 30)
    left, right = rng.choice("(["), rng.choice(")]")
    ops = ("<" if left == "(" else "\\le", "<" if right == ")" else "\\leq")
    flip = {"(": "[", "[": "(", ")": "]", "]": ")"}
    same = [f"{left}{a}, {b}{right}", f"\\left{left}{a},{b}\\right{right}",
            f"x \\in {left}{a},{b}{right}",
            f"{a} {ops[0]} x {ops[1]} {b}",
            f"{left}{a}.0,\\frac{{{2 * b}}}{{2}}{right}"]  # fmt: skip
    edits = [f"{flip[left]}{a},{b}{right}", f"{left}{a},{b}{flip[right]}",
             f"{left}{a},{b + 1}{right}", f"{left}{a - 1},{b}{right}",
             f"{left}{a},\\infty)", f"{a}", f"\\{{{a},{b}\\}}", f"x {ops[1]} {b}",
             f"{left}{b},{a}{right}",
             f"{left}{a},{b}{right} \\cup [{b + 2},{b + 3}]"]  # fmt: skip
    return f"{left}{a},{b}{right}", same, edits


@recipe
def rays(rng):
    a = rng.randrange(-20, 20)
    b = a + rng.randrange(1, 30)
    cases = (
        (f"[{a},\\infty)", [f"x \\ge {a}", f"x >= {a}", f"{a} \\le x", f"[{a}, ∞)",
                            f"[{a},+\\infty)", f"x≥{a}", f"[{a},oo)"],
         [f"x > {a}", f"x \\le {a}", f"({a},\\infty)", f"[{a + 1},\\infty)", f"{a}", f"[{a},{b}]"]),
        (f"(-\\infty,{a})\\cup({b},\\infty)",
         [f"({b},\\infty)\\cup(-\\infty,{a})", f"x<{a} \\text{{ or }} x>{b}", f"(-∞,{a})∪({b},∞)",
          f"\\mathbb{{R}}\\setminus[{a},{b}]"],
         [f"(-\\infty,{a}]\\cup({b},\\infty)", f"({a},{b})", f"(-\\infty,{a})",
          f"(-\\infty,{b})\\cup({a},\\infty)",
          f"(-\\infty,{a})\\cup({b + 1},\\infty)", f"(-\\infty,{a})\\cup[{b},\\infty)"]),
        (f"(-\\infty,{a})\\cup({a},\\infty)", [f"x \\ne {a}",
                                               f"\\mathbb{{R}} \\setminus \\{{{a}\\}}",
                                               f"x<{a} \\text{{ or }} x>{a}"],
         [f"\\mathbb{{R}}", f"x \\ne {a + 1}", f"(-\\infty,\\infty)", f"x={a}"]),
        (f"k \\geqslant {a}", [f"k \\ge {a}", f"[{a},\\infty)", f"{a} \\leqslant k"],
         [f"n \\ge {a}", f"k > {a}", f"k \\le {a}", f"{a}"]),
    )  # fmt: skip
    return rng.choice(cases)


@recipe
def polynomial(rng):
    roots, name = rng.sample(range(-7, 8), rng.choice((2, 3))), rng.choice("xtnk")
    c = expanded(roots)
    ascending = "+".join(f"({v}){name}^{{{k}}}" for k, v in enumerate(c))
    same = [poly(c, name), factored(roots, name), ascending, factored(roots[::-1], name),
            f"f({name}) = {poly(c, name)}",
            f"y={factored(roots, name)}", f"\\frac{{2{factored(roots, name)}}}{{2}}", poly(c,
                                                                                           name).replace(" ", "")]  # fmt: skip
    bumped = [c[0] + 1, *c[1:]]
    edits = [poly(bumped, name), poly([-v for v in c], name), poly(c, "y"), factored([roots[0] + 1,
                                                                                      *roots[1:]],
                                                                                      name),
             f"{factored(roots, name)}{name}", poly([2 * v for v in c], name),
             f"{poly(c, name)} + 10^{{-30}}"]  # fmt: skip
    return rng.choice((poly(c, name), factored(roots, name), f"${poly(c, name)}$")), same, edits


@recipe
def closed_form(rng):
    return rng.choice((
        ("\\frac{n(n+1)}{2}", ["\\frac{n^2+n}{2}", "n(n+1)/2", "\\binom{n+1}{2}",
                               "\\frac12 n(n+1)", "0.5n^2+\\frac n2", "(n+1)n/2"],
         ["\\frac{n(n-1)}{2}", "n(n+1)", "\\frac{m(m+1)}{2}", "\\frac{n^2+1}{2}", "\\binom{n}{2}",
          "\\frac{n(n+1)}{3}"]),
        ("\\binom{2n}{n}", ["\\frac{(2n)!}{n!^2}", "\\dbinom{2n}{n}", "\\frac{(2n)!}{n! n!}"],
         ["\\binom{2n}{n+1}", "\\binom{n}{2}", "\\frac{(2n)!}{n!}", "2^n"]),
        ("2^{n}-n-1", ["2^n-(n+1)", "-1-n+2^{n}", "2\\cdot 2^{n-1}-n-1"], ["2^n-n+1",
                                                                           "2^{n+1}-n-1", "2^n",
                                                                           "n^2-n-1"]),
        ("m n-\\lfloor m / 2\\rfloor", ["nm - \\left\\lfloor \\frac{m}{2} \\right\\rfloor",
                                        "mn-⌊m/2⌋"],
         ["mn-\\lceil m/2\\rceil", "mn-m/2", "mn", "mn-\\lfloor n/2\\rfloor"]),
        ("\\frac{1}{2a}(e^{at}-e^{-at})", ["\\frac{\\sinh(at)}{a}",
                                           "\\frac{e^{a t}-e^{-a t}}{2 a}",
                                           "\\frac{1}{2a}(\\exp(at)-\\exp(-at))"],
         ["\\frac{1}{2a}(e^{at}+e^{-at})", "\\frac{\\cosh(at)}{a}",
          "\\frac{1}{2}(e^{at}-e^{-at})"]),
        ("C_{1} \\cos (2 t)+C_{2} \\sin (2 t)", ["C_2\\sin 2t + C_1\\cos 2t",
                                                 "C_1\\cos(2t)+C_2\\sin(2t)"],
         ["C_1\\cos 2t + C_1 \\sin 2t", "C_{2} \\cos (2 t)+C_{1} \\sin (2 t)", "\\cos 2t+\\sin 2t",
          "C_{1} \\cos (t)+C_{2} \\sin (2 t)"]),
        ("\\sqrt{2} \\cos (2 t-\\pi / 4)", ["\\cos(2t)+\\sin(2t)",
                                            "\\sqrt2\\cos(2t-\\frac{\\pi}{4})"],
         ["\\sqrt{2} \\cos (2 t+\\pi / 4)", "\\cos(2t)-\\sin(2t)", "2\\cos(2t-\\pi/4)"]),
        ("\\frac{a M^{1 / 3}}{G M^{2 / 3}+b}", ["\\frac{a\\sqrt[3]{M}}{b+G M^{2/3}}"],
         ["\\frac{a M^{1/3}}{G M^{2/3}-b}", "\\frac{a M}{GM+b}"]),
        ("\\frac{\\log 2}{\\log 2-\\log 3}", ["\\frac{\\ln 2}{\\ln 2-\\ln 3}",
                                              "\\frac{\\ln 2}{\\ln(2/3)}", "\\log_{2/3} 2"],
         ["\\frac{\\log 3}{\\log 2-\\log 3}", "-1.7095", "\\frac{\\ln 2}{\\ln 3-\\ln 2}"]),
    ))  # fmt: skip


@recipe
def assignment(rng):
    m, c, k = rng.randrange(2, 9), rng.randrange(1, 9), rng.randrange(2, 5)
    same = [
        f"{m}x+{c}",
        f"y={c}+{m}x",
        f"{m}x - y + {c} = 0",
        f"{k}y = {k * m}x + {k * c}",
        f"y = {m}(x+\\frac{{{c}}}{{{m}}})",
    ]
    edits = [
        f"{m}x-{c}",
        f"y={m + 1}x+{c}",
        f"z = {m}x+{c}",
        f"x = {m}y+{c}",
        f"{m}x + y + {c} = 0",
        f"y={c}",
        f"{m}t+{c}",
        "y=y",
    ]
    if rng.random() < 0.5:
        return f"y = {m}x + {c}", same, edits
    same = [f"{m}x+{c}", f"f(x)={c}+{m}x", f"f(x) = {k * m}x/{k} + {c}"]
    return (
        f"f(x)={m} x+{c}",
        same,
        [f"f(x)={m}x", f"g(x)={m}x+{c}", f"{m}x-{c}", f"f(x)={m}x+{c}, f(x)=x"],
    )


@recipe
def equation(rng):
    a, b, c = rng.randrange(2, 9), rng.randrange(2, 9), rng.randrange(1, 9)
    if rng.random() < 0.5:
        a, b = a + 9, b + 20
    same = [
        f"{2 * a}x - {2 * b}y + {2 * c} = 0",
        f"{a}x + {c} = {b}y",
        f"-{a}x+{b}y-{c}=0",
        f"{b}y-{a}x = {c}",
        f"y=\\frac{{{a}x+{c}}}{{{b}}}",
    ]
    edits = [f"{a}x - {b}y - {c} = 0", f"{a}x + {b}y + {c} = 0", f"{a}x-{b}y+{c}",
             f"{a}x - {b}y + {c} = 1", "0=0", f"{a + 1}x - {b}y + {c} = 0",
             f"{a}x - {b}z + {c} = 0", f"{a}x - {b}y + {c} \\ge 0"]  # fmt: skip
    return f"{a}x - {b}y + {c} = 0", same, edits


@recipe
def matrix(rng):
    rows = [[rng.randrange(-9, 10) for _ in range(2)] for _ in range(2)]
    if rows[0][1] == rows[1][0]:
        rows[0][1] += 1

    def show(rows, kind="pmatrix"):
        return (
            f"\\begin{{{kind}}} "
            + " \\\\ ".join(" & ".join(map(str, row)) for row in rows)
            + f" \\end{{{kind}}}"
        )

    flipped = [list(row) for row in zip(*rows, strict=True)]
    bumped = [[rows[0][0] + 1, rows[0][1]], rows[1]]
    doubled = [[2 * x for x in row] for row in rows]
    same = [show(rows, "bmatrix"), show(rows).replace(" ", ""), f"\\frac{{1}}{{2}}{show(doubled)}",
            f"A = {show(rows)}",
            show([[frac(2 * x, 2) for x in row] for row in rows])]  # fmt: skip
    edits = [
        show(flipped),
        show(bumped),
        show(rows[:1]),
        show([row[:1] for row in rows]),
        show(doubled),
        f"-{show(rows)}" if any(map(any, rows)) else "0",
    ]
    return show(rows), same, edits


@recipe
def complex_number(rng):
    a, b = rng.sample(range(1, 10), 2)
    square = f"{a * a - b * b}{2 * a * b:+d}i"
    if rng.random() < 0.5:
        return square, [f"({a}+{b}i)^2", f"{2 * a * b}i+{a * a - b * b}", f"-({b}-{a}i)^2"], [
            f"({a}-{b}i)^2", f"{a * a - b * b}", f"{2 * a * b}i", f"({a}+{b}i)^3",
            f"{a * a + b * b}+{2 * a * b}i"]  # fmt: skip
    return f"{a}-{b}i", [f"-{b}i+{a}", f"{a}-{b}\\mathrm{{i}}", f"z={a}-{b}i",
                         f"\\frac{{{2 * a}-{2 * b}i}}{{2}}"], [
        f"{a}+{b}i", f"-{a}-{b}i", f"{b}-{a}i" if a != b else "0", f"{a}-{b}", f"({a},-{b})",
        f"{a}-{b}x"]  # fmt: skip


@recipe
def in_base(rng):
    base = rng.randrange(4, 10)
    digits = "".join(str(rng.randrange(1, base)) for _ in range(rng.randrange(2, 5)))
    other = base + 1 if base < 9 else 4 if max(digits) < "4" else 11
    same = [
        f"{digits}_{{{base}}}",
        f"({digits})_{base}",
        f"N = {digits}_{base}",
        f"0{digits}_{base}",
    ]
    edits = [
        f"{digits}_{{{other}}}",
        f"{digits}1_{base}",
        digits,
        f"{digits}_{{10}}",
        f"{digits[::-1]}_{base}" if digits != digits[::-1] else "0",
    ]
    return f"{digits}_{base}", same, edits


@recipe
def words(rng):
    word, other = rng.sample(("west", "even", "ellipse", "Evelyn", "monday", "increasing"), 2)
    letter, next_letter = rng.sample("ABCDE", 2)
    return rng.choice((
        (f"\\text{{{word}}}", [word, f"\\text{{{word.upper()}}}", f"\\textbf{{{word}}}",
                               f"\\mathrm{{{word}}}", f" {word}. "],
         [other, f"\\text{{{other}}}", f"\\text{{not {word}}}", f"\\text{{{word} or {other}}}",
          word[::-1], word[:-1]]),
        (f"\\text{{({letter})}}", [letter, f"({letter})", f"\\textbf{{{letter}}}",
                                   f"\\text{{({letter.lower()})}}", f"\\mathrm{{({letter})}}"],
         [next_letter, f"({next_letter})", f"{letter}, {next_letter}",
          f"{letter} \\text{{ or }} {next_letter}", f"{letter}{next_letter}"]),
    ))  # fmt: skip


@recipe
def ratio(rng):
    a, b = rng.choice(((3, 4), (5, 7), (2, 9), (1, 6)))
    return (
        f"{a}:{b}",
        [f"{a} : {b}", f"{2 * a}:{2 * b}"],
        [f"{b}:{a}", f"{a}:{b + 1}", f"{a}:{b}:1", f"{a},{b}"],
    )


@recipe
def only_text(rng):
    name = rng.choice("vyq")
    label = f"\\lim_{{t \\to 0}} {name}^{{\\prime\\prime}}(t) \\sum_k c_k"
    return (
        label,
        [f" {label} ", f"${label}$"],
        [label.replace("0", "1"), "0", label.replace("\\prime\\prime", "\\prime"), name],
    )


WRAPS = (
    "<think>\nSo we get \\boxed{{0}} at first.\n</think>\n\nTherefore \\boxed{{{}}}.",
    "We compute.\n</think>\n\n$$\\boxed{{{}}}$$",
    "Thus the answer is \\(\\boxed{{{}}}\\). Let me know if you need more detail!",
    "<think>x</think>\n**Answer:**\n\\[\n\\boxed {{{}}}\n\\]<|im_end|>",
)


def pairs(count, seed=0):
    """At least `count` tuples (response, label, expected, answer), all recipes in turn."""
    rng, out = random.Random(seed), []
    while len(out) < count:
        for make in RECIPES:
            label, same, edits = make(rng)
            for answers, expected in (([label, *same], True), (edits, False)):
                out += [(rng.choice(WRAPS).format(x), label, expected, x) for x in answers]
    return out
