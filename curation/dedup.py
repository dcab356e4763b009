"""Which problems are the same problem: normalised text and n-gram overlap, in linear time.

Problems of one kind share a template and differ in a number, so a high overlap alone says little.
Two texts are nearly equal here if they also hold the same numbers and signs. What many texts share
does not count.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

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
    as a request to box the answer. A text of such lines alone keeps them; one without any token
    stands for itself.
    """
    lines_of = [[tuple(tokens(line)) for line in text.splitlines()] for text in texts]
    holders = Counter(line for lines in lines_of for line in set(lines))
    result = []
    for text, lines in zip(texts, lines_of, strict=True):
        own = [line for line in lines if holders[line] < common]
        words = tuple(chain(*own)) or tuple(chain(*lines))
        result.append(words or (text,))
    return result


def ngrams(words: Sequence[str], n: int) -> set[int]:
    """Hashes of all runs of n words; of the whole text if it is shorter."""
    return {hash(tuple(words[i : i + n])) for i in range(max(1, len(words) - n + 1))}


def numbers(words: Sequence[str]) -> list[str]:
    """Numbers and signs of a text, sorted: where these differ, only the template is shared."""
    return sorted(word for word in words if word[:1].isdigit() or word in "+-<>")


def near(
    texts: Sequence[Sequence[str]], n: int, threshold: float, common: int
) -> Iterator[list[int]]:
    """For each text (tokens) in turn, the indices of the earlier ones that nearly equal it, nearest
    first, of equally near ones the earliest.

    Nearly equal: the same numbers, and at least `threshold` of the n-grams of the shorter text are
    in the longer one. An n-gram that `common` texts or more hold does not count. So no list of the
    inverted index is longer than that, and the cost is linear in the length of all texts.
    """
    grams = [ngrams(words, n) for words in texts]
    holders = Counter(gram for own in grams for gram in own)
    grams = [{g for g in own if holders[g] < common} for own in grams]
    signatures = [numbers(words) for words in texts]
    index: dict[int, list[int]] = defaultdict(list)
    for i, own in enumerate(grams):
        shared = Counter(j for g in own for j in index.get(g, ()))
        # Ties by place, not by the order of a set of hashes, which differs from process to process.
        nearest_first = sorted(shared.items(), key=lambda item: (-item[1], item[0]))
        yield [
            j
            for j, count in nearest_first
            if count >= threshold * min(len(own), len(grams[j])) and signatures[i] == signatures[j]
        ]
        for g in own:
            if holders[g] > 1:  # most n-grams occur once, and would only fill the memory
                index[g].append(i)
