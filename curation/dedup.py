"""Which problems are the same problem: normalised text and n-gram overlap, in linear time.

Problems of one kind share a template and differ in a number, so a high overlap alone says little.
Two texts are nearly equal here if they also hold the same numbers and signs, and what many texts
share does not count.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

# Layout of formulas that differs between copies of the same problem.
LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|quad|qquad|text|textbf|mathrm)(?![A-Za-z])|\\[,;:! ]|[${}\\~]"
)
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
# A word, a number, an operator or an East Asian character; punctuation does not count.
TOKEN = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|\d+(?:\.\d+)?|[^\W\d_]+|[-+*/=<>^|!%]")


def tokens(text: str) -> list[str]:
    """Words, numbers and operators of a text: the same for copies that differ in layout."""
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").casefold()
    return TOKEN.findall(THOUSANDS.sub("", LAYOUT.sub(" ", text)))


def contents(texts: Sequence[str], common: int) -> list[tuple[str, ...]]:
    """Tokens of each text without the lines that `common` texts or more share: instructions, such
    as a request to box the answer. A text that has no other line keeps all; one without a token
    is its own.
    """
    lines = [[tuple(tokens(line)) for line in text.splitlines()] for text in texts]
    holders = Counter(line for text in lines for line in set(text))
    join = lambda text: tuple(word for line in text for word in line)
    own = [join(line for line in t if holders[line] < common) or join(t) for t in lines]
    return [words or (text,) for words, text in zip(own, texts, strict=True)]


def ngrams(words: Sequence[str], n: int) -> set[int]:
    """Hashes of all runs of n words; of the whole text if it is shorter."""
    return {hash(tuple(words[i : i + n])) for i in range(max(1, len(words) - n + 1))}


def numbers(words: Sequence[str]) -> list[str]:
    """Numbers and signs of a text, sorted: where these differ, only the template is shared."""
    return sorted(word for word in words if word[:1].isdigit() or word in "+-<>")


def near(
    texts: Sequence[Sequence[str]], n: int, threshold: float, common: int
) -> Iterator[list[int]]:
    """For each text (tokens) in turn, the earlier ones that nearly equal it, nearest first, of
    equally near ones the earliest.

    Nearly equal: the same numbers, and at least `threshold` of the n-grams of the shorter text are
    in the longer one. An n-gram of `common` texts or more counts nowhere. So no list of the
    inverted index is longer than that, and the cost is linear in the length of all texts.
    """
    grams = [ngrams(words, n) for words in texts]
    holders = Counter(gram for own in grams for gram in own)
    grams = [{g for g in own if holders[g] < common} for own in grams]
    signatures = [numbers(words) for words in texts]
    index: dict[int, list[int]] = defaultdict(list)
    for i, own in enumerate(grams):
        shared = Counter(j for g in own for j in index.get(g, ()))
        least = lambda j, own=own: threshold * min(len(own), len(grams[j]))
        yield [
            j
            for j, count in sorted(shared.items(), key=lambda item: (-item[1], item[0]))
            if count >= least(j) and signatures[i] == signatures[j]
        ]
        for g in own:
            if holders[g] > 1:
                index[g].append(i)
