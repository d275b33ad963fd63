"""Stopping rules, evaluated on records: the seconds that a text takes if a signal ends its drafts.

A text and its drafts do not depend on the rule, since speculation is lossless. So a rule is evaluated
exactly, up to the costs of passes: from the start of the text, each pass drafts and verifies what the rule
says, advances by the accepted tokens and one more, and the next pass drafts from there.
"""

from typing import NamedTuple

import numpy as np

CAPS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15)  # longest drafts; with no other threshold, the fixed lengths
THRESHOLDS = 12  # that are tried, of each form of a rule
BINS = 8  # of a signal, in each of which P(accepted) is one number


class Drafts(NamedTuple):
    """The drafts of a drafter from every position of a text, with k tokens at most."""

    accepted: np.ndarray  # int [positions], tokens that a draft begins with and the text has
    offered: np.ndarray  # int [positions]
    signals: dict[str, np.ndarray]  # float [positions, k]; the higher, the likelier is acceptance
    step_seconds: np.ndarray  # float [positions], of drafting a token
    verify_seconds: np.ndarray  # float [positions, k + 1], of verifying 0, 1, … tokens

    @property
    def tested(self) -> np.ndarray:
        """Whether all before it were accepted, so that its acceptance is known; bool `[positions, k]`."""
        index = np.arange(self.verify_seconds.shape[1] - 1)
        return index < np.minimum(self.accepted + 1, self.offered)[:, None]

    @property
    def is_accepted(self) -> np.ndarray:
        """Whether the text has it and all before it; bool `[positions, k]`."""
        return np.arange(self.verify_seconds.shape[1] - 1) < self.accepted[:, None]

    @property
    def room(self) -> np.ndarray:
        """Tokens that may be drafted, so that no pass goes past the end of the text; int `[positions]`."""
        positions = len(self.accepted)
        return np.minimum(self.offered, positions - 1 - np.arange(positions))


class Form(NamedTuple):
    """How a signal is used."""

    known_before: bool = False  # a token's signal is known before the token is drafted
    products: bool = True  # also products of calibrated probabilities are compared with a threshold


class Rule(NamedTuple):
    """A draft ends at `cap` tokens, or where its score falls below a threshold."""

    cap: int
    threshold: float = -np.inf
    product: bool = False  # the score: Π P(accepted | signal); otherwise the lowest signal so far
    keeps: bool = False  # the token with which it falls is verified, too


class Calibration(NamedTuple):
    """P(accepted) by a signal, constant between edges."""

    edges: np.ndarray
    probability: np.ndarray

    @classmethod
    def fit(cls, texts: list[Drafts], signal: str) -> "Calibration":
        """Fits it to tokens whose acceptance is known."""
        values = np.concatenate([text.signals[signal][text.tested] for text in texts])
        accepted = np.concatenate([text.is_accepted[text.tested] for text in texts])
        edges = np.unique(np.quantile(values, np.arange(1, BINS) / BINS)) if len(values) else np.zeros(0)
        place = np.searchsorted(edges, values, side="right")
        number = np.bincount(place, minlength=len(edges) + 1)
        hits = np.bincount(place, weights=accepted, minlength=len(edges) + 1)
        return cls(edges, (hits + 0.5) / (number + 1.0))

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """P(accepted), of the same shape."""
        return self.probability[np.searchsorted(self.edges, values, side="right")]


def seconds(text: Drafts, drafted: np.ndarray, verified: np.ndarray) -> np.ndarray:
    """Seconds of a text under several rules, float `[rules]`.

    Args:
        text: the drafts of the text.
        drafted: int `[rules, positions]`, tokens that a pass from there drafts.
        verified: int `[rules, positions]`, those that it verifies, at most `drafted`.
    """
    number, end = np.arange(len(drafted)), len(text.accepted)
    position, total = np.zeros(len(drafted), int), np.zeros(len(drafted))
    while (going := position < end).any():
        at = np.minimum(position, end - 1)
        steps, verifies = drafted[number, at], verified[number, at]
        spent = steps * text.step_seconds[at] + text.verify_seconds[at, verifies]
        total += np.where(going, spent, 0.0)
        position = position + np.minimum(text.accepted[at], verifies) + 1
    return total


def oracle(text: Drafts) -> float:
    """The least seconds of a text, by a rule that knows what will be accepted."""
    end = len(text.accepted)
    best = np.zeros(end + 1)
    most = np.minimum(text.accepted, text.room)
    for position in range(end - 1, -1, -1):
        number = np.arange(most[position] + 1)
        spent = number * text.step_seconds[position] + text.verify_seconds[position, number]
        best[position] = (spent + best[position + 1 + number]).min()
    return float(best[0])


def scores(text: Drafts, signal: str, calibration: Calibration, product: bool) -> np.ndarray:
    """Scores that a rule compares with its threshold: descending along each draft, float `[positions, k]`.

    Args:
        text: the drafts of the text.
        signal: the name of the signal.
        calibration: P(accepted) by the signal.
        product: as in `Rule`.
    """
    values = text.signals[signal]
    return np.cumprod(calibration(values), 1) if product else np.minimum.accumulate(values, 1)


def candidates(texts: list[Drafts], signal: str, form: Form, calibration: Calibration) -> list[Rule]:
    """The rules among which the best one is chosen; the fixed lengths are among them.

    Args:
        texts: the texts on which thresholds are placed.
        signal: the name of the signal.
        form: how it is used.
        calibration: P(accepted) by the signal.
    """
    rules = [Rule(cap) for cap in CAPS]
    for product in (False, True)[: 1 + form.products]:
        values = [scores(t, signal, calibration, product)[t.tested] for t in texts]
        pooled = np.concatenate(values)
        if not len(pooled):
            continue
        # Thresholds are as many tokens apart, the highest of them above all.
        levels = np.unique(np.quantile(pooled, np.arange(1, THRESHOLDS + 1) / THRESHOLDS))
        for keeps in (False, True)[: 2 - form.known_before]:
            rules += [Rule(cap, float(level), product, keeps) for level in levels for cap in CAPS[1:]]
    return rules


def draft_lengths(
    text: Drafts, signal: str, form: Form, calibration: Calibration, rules: list[Rule]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that rules draft and verify at every position, int `[rules, positions]` each.

    Args:
        text: the drafts of the text.
        signal: the name of the signal.
        form: how it is used.
        calibration: P(accepted) by the signal.
        rules: the rules.
    """
    running = {product: scores(text, signal, calibration, product) for product in (False, True)}
    above: dict[tuple[bool, float], np.ndarray] = {}
    for rule in rules:
        key = rule.product, rule.threshold
        if key not in above:
            above[key] = (running[rule.product] >= rule.threshold).sum(1)
    passing = np.stack([above[rule.product, rule.threshold] for rule in rules])
    most = np.minimum(text.room, np.array([rule.cap for rule in rules])[:, None])
    if form.known_before:
        return (length := np.minimum(passing, most)), length
    drafted = np.minimum(passing + 1, most)
    keeps = np.array([rule.keeps for rule in rules])[:, None]
    return drafted, np.where(keeps, drafted, np.minimum(passing, most))


class Evaluation(NamedTuple):
    """A signal as a stopping rule: seconds of each text, under the rule chosen on the other half of them."""

    seconds: np.ndarray  # float [texts]
    rules: list[Rule]  # chosen on either half


def evaluate(texts: list[Drafts], signal: str | None, form: Form) -> Evaluation:
    """Chooses the rule of a signal on half of the texts, times the other half with it, and the reverse.

    Args:
        texts: the drafts of at least two texts.
        signal: the name of the signal; None chooses among fixed lengths.
        form: how it is used.
    """
    if len(texts) < 2:
        raise ValueError(f"texts must be at least 2 for one half to judge the other; got {len(texts)}")
    halves = [texts[0::2], texts[1::2]]
    result, chosen = np.zeros(len(texts)), []
    for number, (train, test) in enumerate((halves, halves[::-1])):
        if signal is None:
            rules = [Rule(cap) for cap in CAPS]
            lengths = lambda text, rules: (_fixed(text, rules),) * 2
        else:
            calibration = Calibration.fit(train, signal)
            rules = candidates(train, signal, form, calibration)
            lengths = lambda text, rules, c=calibration: draft_lengths(text, signal, form, c, rules)
        spent = sum(seconds(text, *lengths(text, rules)) for text in train)
        best = rules[int(np.argmin(spent))]
        chosen.append(best)
        result[1 - number :: 2] = [seconds(text, *lengths(text, [best]))[0] for text in test]
    return Evaluation(result, chosen)


def _fixed(text: Drafts, rules: list[Rule]) -> np.ndarray:
    """The lengths of rules without thresholds."""
    return np.minimum(text.room, np.array([rule.cap for rule in rules])[:, None])
