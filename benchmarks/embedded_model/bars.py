"""The bars of the embedded model, and the statistics of task words in texts."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import comb
from typing import Any, NamedTuple

from entropic_jax.models.train import tasks

MOST_BITS_PER_BYTE = 0.80
LEAST_RECALL = {2048: 1.0, 7500: 0.8}
MOST_LOOPS = 0.1  # of greedy texts
CHANCE = 0.05  # of a word in excess where the model has no preference, over all words together
WORD = re.compile("|".join(sorted(tasks.WORDS, key=len, reverse=True)))
_PAIR = rf"(?:{WORD.pattern})_(?:{WORD.pattern})"
TEMPLATES = {
    "key–value": re.compile(rf'table\["|\["{_PAIR}"\]'),
    "needle": re.compile(r"# The secret number of"),
    "variable": re.compile(rf"(?m)^(assert )?{_PAIR} ==? "),
    "definition": re.compile(rf"def {_PAIR}\(|^# as above$", re.MULTILINE),
    "header": re.compile(re.escape(tasks.HEADER.strip())),
}


class Row(NamedTuple):
    """A figure and its bar, as text."""

    what: str
    figure: str
    bar: str
    met: bool


def templates(text: str) -> list[str]:
    """Names of the templates of tasks that occur in a text.

    >>> templates('table["button_cellar"] = "wallow"'), templates("assert star == 1")
    (['key–value'], [])
    """
    return [name for name, pattern in TEMPLATES.items() if pattern.search(text)]


def task_words(text: str) -> set[str]:
    """The task words that a text has as whole words, parts of names included.

    >>> sorted(task_words("def river_bridge(appleSeed): start"))
    ['apple', 'bridge', 'river']
    """
    parts = re.findall("[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())
    return set(parts).intersection(tasks.WORDS)


def tail(hits: int, trials: int, chance: float) -> float:
    """Probability of `hits` or more in `trials` of that chance.

    >>> round(tail(1, 2, 0.5), 3), tail(0, 5, 0.1)
    (0.75, 1.0)
    """
    below = sum(comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(hits))
    return max(0.0, 1.0 - below)


def words_in_excess(texts: Sequence[set[str]], references: Iterable[set[str]]) -> dict[str, int]:
    """Words that more texts have than the share of references that have them explains.

    A word counts once a text, so that a text in a loop counts once. Over all words together, some word is
    reported with a probability of `CHANCE` at most where texts are drawn like references.

    Args:
        texts: task words of each text.
        references: task words of stretches of held-out text, each as long as a text.

    Returns:
        How many texts have the word, for each word in excess.
    """
    references = list(references)
    expected = Counter(word for words in references for word in words)
    actual = Counter(word for words in texts for word in words)
    limit = CHANCE / len(tasks.WORDS)
    chance = {word: (expected[word] + 1) / (len(references) + 2) for word in actual}
    return {w: n for w, n in sorted(actual.items()) if tail(n, len(texts), chance[w]) < limit}


def rows(figures: dict[str, Any]) -> list[Row]:
    """The table of the figures that were measured."""
    result = []
    if "bits_per_byte" in figures:
        value = figures["bits_per_byte"]
        bar = f"≤ {MOST_BITS_PER_BYTE:.2f}"
        result.append(Row("held-out bits per byte", f"{value:.3f}", bar, value <= MOST_BITS_PER_BYTE))
    for name, by_distance in figures.get("recall", {}).items():
        for distance, recalled in by_distance.items():
            least = LEAST_RECALL[int(distance)]
            share = recalled["right"] / recalled["cases"]
            figure = f"{100 * share:.0f} % of {recalled['cases']}"
            result.append(
                Row(f"recall at {distance}, {name}", figure, f"≥ {100 * least:.0f} %", share >= least)
            )
    if "leaks" in figures:
        leaks = figures["leaks"]
        count, excess = leaks["texts"], leaks["words_in_excess"]
        with_template = sum(leaks["templates"].values())
        named = ", ".join(f"{n} {name}" for name, n in leaks["templates"].items() if n)
        figure = f"{with_template} of {count}" + (f" ({named})" if named else "")
        result.append(Row("templates of tasks in sampled texts", figure, "0", with_template == 0))
        figure = (
            f"{100 * leaks['share_with_a_word']:.0f} % of texts have one (held-out "
            f"{100 * leaks['reference_share']:.0f} %); in excess: {', '.join(excess) or 'none'}"
        )
        result.append(Row("task words in sampled texts", figure, "none in excess", not excess))
    if "loops" in figures:
        loops, count = figures["loops"], figures["greedy_texts"]
        most = int(MOST_LOOPS * count)
        result.append(Row("greedy texts that loop", f"{loops} of {count}", f"≤ {most}", loops <= most))
    return result
