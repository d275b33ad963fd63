"""Recall of facts over a distance, for each kind of `tasks`.

A window is held-out source code with one fact of each kind, distractors scattered around them, and the four
questions a set number of tokens below. A question counts as answered if every token of the answer is the
model's most probable one.
"""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from . import scoring, tasks
from .data import encode_task

DISTANCES = (128, 512, 1024, 2048, 4096, 8000)  # tokens from the end of a fact to its question
DISTRACTOR_EVERY = 128  # tokens, the kinds taking turns
ROOM = 384  # least number of tokens of a window outside the distance
SPARE = 12  # tokens: pieces encoded together may come to a few more than apart


class Answer(NamedTuple):
    """Where the tokens of an answer stand in their window, and how far its fact is from the question."""

    positions: np.ndarray
    distance: int


class Filler:
    """Held-out source as lines, each with the number of tokens that end in it."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.lines: list[str] = []
        sizes = []
        for text, encoding in zip(
            texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True
        ):
            lines = text.splitlines(keepends=True)
            last = np.array([stop for _, stop in encoding.offsets]) - 1  # character
            line = np.searchsorted(np.cumsum([len(x) for x in lines]), last, side="right")
            sizes.append(np.bincount(line, minlength=len(lines)))
            self.lines += lines
        self.sizes = np.concatenate(sizes)
        self.total = np.concatenate([[0], np.cumsum(self.sizes)])

    def count(self, text: str) -> int:
        """How many tokens `text` makes on its own."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def stretch(self, rng: np.random.Generator, tokens: int) -> list[str]:
        """Consecutive lines of about `tokens` tokens, not more, starting at random."""
        last = int(np.searchsorted(self.total, self.total[-1] - tokens, side="right")) - 1
        if last < 1:
            raise ValueError(f"texts must hold more than {tokens} tokens of filler; got {self.total[-1]}")
        first = int(rng.integers(last))
        stop = int(np.searchsorted(self.total, self.total[first] + tokens, side="right")) - 1
        return self.lines[first:stop]

    def short_line(self, rng: np.random.Generator) -> str:
        """One line that is not blank, of at most SPARE tokens."""
        while True:
            i = int(rng.integers(len(self.lines)))
            if self.lines[i].strip() and self.sizes[i] <= SPARE:
                return self.lines[i]


def make_window(
    rng: np.random.Generator, distance: int, filler: Filler, header: str = tasks.HEADER
) -> tuple[np.ndarray, dict[str, Answer]]:
    """Tokens of a window, at most 8193, and the answer to look for of each kind.

    Facts and questions come in the same order, so that each pair is about `distance` tokens apart. A line
    of filler follows every answer: how an answer's last token ends depends on what comes next.

    Args:
        rng: the random generator of facts and filler.
        distance: tokens between a fact and its question.
        filler: lines between them.
        header: first line of the window, which marks it as one of the generated documents.
    """
    length = next(n for n in scoring.LENGTHS if n >= min(distance + ROOM, scoring.LENGTHS[-1]))
    kinds = [str(kind) for kind in rng.permutation(list(tasks.KINDS))]
    facts = [tasks.KINDS[kind](rng) for kind in kinds]
    pairs = range(len(facts))
    questions = [(fact.question, fact.answer, filler.short_line(rng)) for fact in facts]
    above = np.array([filler.count(fact.statement) for fact in facts])
    below = np.array([sum(map(filler.count, texts)) for texts in questions])
    beside = np.mean([above[i + 1 :].sum() + below[:i].sum() for i in pairs])  # the gap, between a pair
    room = length - int(above.sum() + below.sum()) - SPARE - filler.count(header)
    gap = min(room, max(0, distance - round(float(beside))))
    heads = {fact.question for fact in facts}

    def stretch(tokens: int) -> str:
        others = [tasks.KINDS[kinds[i % len(kinds)]](rng) for i in range(max(4, tokens // DISTRACTOR_EVERY))]
        statements = [o.statement for o in others if o.question not in heads]
        taken = sum(map(filler.count, statements))
        if taken > tokens:
            return "".join(filler.stretch(rng, tokens))
        lines = filler.stretch(rng, tokens - taken)
        for statement in statements:
            lines.insert(int(rng.integers(len(lines) + 1)), statement)
        return "".join(lines)

    texts = [header, stretch(room - gap), *(fact.statement for fact in facts), stretch(gap)]
    texts += [text for three in questions for text in three]
    pieces = [tasks.Piece(text, number) for number, text in enumerate(texts) if text]
    tokens, piece = encode_task(filler.tokenizer, pieces)
    head = max(1, int((piece == 0).sum()))  # the first token of a text, and the header
    kept = np.r_[0:head, max(head, len(tokens) - length - 1 + head) : len(tokens)]  # of the lead the last
    tokens, piece = tokens[kept], piece[kept].astype(int)
    piece_positions = [np.flatnonzero(piece == number) for number in range(len(texts))]
    question = [len(facts) + 3 + 3 * i for i in pairs]  # numbers of the pieces
    between = [piece_positions[question[i]][0] - piece_positions[2 + i][-1] - 1 for i in pairs]
    return tokens, {kinds[i]: Answer(piece_positions[question[i] + 1], int(between[i])) for i in pairs}


def interval(right: int, cases: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share.

    Args:
        right: cases that were right.
        cases: cases in all, at least 1.
        z: quantile of the normal distribution; 1.96 for 95 %.
    """
    share, weight = right / cases, z * z / cases
    middle = (share + weight / 2) / (1 + weight)
    reach = z * sqrt(share * (1 - share) / cases + weight / (4 * cases)) / (1 + weight)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def measure_recall(
    score: scoring.Score,
    filler: Filler,
    cases: int,
    seed: int,
    advance: scoring.Advance,
    distances: Sequence[int] | None = None,
    header: str = tasks.HEADER,
) -> dict[str, list[dict[str, float]]]:
    """For each kind, one row for each distance: accuracy, its 95 % interval, the mean distance met.

    Args:
        score: function that scores windows.
        filler: lines between facts and questions.
        cases: per kind and distance.
        seed: the seed of the windows.
        advance: called with the number of windows done, and of all.
        distances: tokens between facts and questions; None is `DISTANCES`.
        header: first line of every window.
    """
    distances = DISTANCES if distances is None else distances
    windows = [
        make_window(np.random.default_rng((seed, distance, number)), distance, filler, header)
        for distance in distances
        for number in range(cases)
    ]
    scores = score([tokens for tokens, _ in windows], advance)

    def row(kind: str, first: int) -> dict[str, float]:
        indices = range(first, first + cases)
        answers = [windows[i][1][kind] for i in indices]
        right = sum(bool(scores[i].hit[a.positions - 1].all()) for i, a in zip(indices, answers, strict=True))
        low, high = interval(right, cases)
        return {
            "distance": distances[first // cases],
            "mean_distance": round(float(np.mean([a.distance for a in answers])), 1),
            "cases": cases,
            "right": right,
            "accuracy": right / cases,
            "low": round(low, 4),
            "high": round(high, 4),
        }

    return {kind: [row(kind, i * cases) for i in range(len(distances))] for kind in tasks.KINDS}
