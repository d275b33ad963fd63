"""Choice between launches with and without drafts, by the tokens a second that each kind has emitted.

The draft-length law knows what a pass costs on the device. What a launch costs besides (emission, the host,
other work on the machine) is in its measured rate alone, so the kind that has been slower waits. It gets two
launches from time to time, because texts change. The first of them is short, and does not count: after a
launch of the other kind, steps take longer. The second is as long as any, since what a launch costs besides
its steps weighs more in a short one.

Measured times vary by more than drafts cost. But a pass costs at least a step, and emits one token that was
not drafted. So launches with drafts are at most as much faster than plain ones as their tokens are more than
those of them that cannot have been drafted. Where the law drafts nothing, plain launches are the faster ones,
whatever the clock says, and a try ends with its first launch.

The speed of the machine changes the rates of both kinds. So a launch that changes the rate of its kind
scales that of the kind that waits by as much. What a change of the texts does to one kind alone shows in the
next try.
"""

from typing import NamedTuple

LEARNING_LAUNCHES = 3  # of each kind, before they are compared
LONGEST_WAIT = 32  # launches until the slower kind is tried again
TRIAL_STEPS = 4  # of the first launch that tries the slower kind, at most
HOPEFUL = 0.97  # of the rate of plain launches: slower drafts are not for new sequences
LEARNING_RATE = 0.25  # weight of the latest launch in a rate
TRIAL_WEIGHT = 0.5  # the same of one after launches of the other kind
PASS_COST = 1.01  # of a pass, in steps, at least


class Rate(NamedTuple):
    """Tokens a second of each row in recent launches, the latest with the largest weight."""

    tokens_per_second: float = 0.0
    launches: int = 0

    def with_launch(self, tokens: float, seconds: float, weight: float) -> "Rate":
        """The rate after one more launch; the first one may have waited for a compilation.

        Args:
            tokens: the tokens that a row emitted, on average.
            seconds: the seconds that the launch took.
            weight: the weight of the launch in the rate.
        """
        if self.launches < 2:
            return Rate(tokens / seconds, self.launches + 1)
        change = tokens / seconds - self.tokens_per_second
        return Rate(self.tokens_per_second + weight * change, self.launches + 1)

    def scaled(self, factor: float) -> "Rate":
        """The rate of a machine that is so many times as fast."""
        return self._replace(tokens_per_second=factor * self.tokens_per_second)


class DraftChoice:
    """Which kind of launch a batch bucket gets next."""

    def __init__(self) -> None:
        """Start with launches that draft."""
        self._rates: dict[tuple[int, bool], Rate] = {}  # by width and whether tokens are drafted
        self._due: dict[int, int] = {}  # launches until the slower kind is tried again
        self._wait: dict[int, int] = {}  # launches between its last two tries
        self._planned: tuple[int, bool] | None = None  # width and kind of the launch planned last
        self._latest: tuple[int, bool] | None = None  # of the launch recorded last
        self._uncounted: set[tuple[int, bool]] = set()  # those whose latest launch did not count
        # Fraction of the tokens of launches with drafts that no draft can have been, by width.
        self._undrafted: dict[int, float] = {}
        self._running: dict[int, bool] = {}  # the kind of the latest launch that counted, by width

    def drafts(self, width: int, untried: float, *, recorded: bool = True) -> bool:
        """Whether the next launch should draft tokens.

        Args:
            width: rows of the program.
            untried: fraction of the sequences for which nothing was ever drafted.
            recorded: whether `record` will be told of the launch. One that it is not told of teaches nothing,
                so it only drafts where drafts are known to be faster.
        """
        plain, drafting = self._rate(width, False), self._drafting(width)
        if not recorded:
            return min(plain.launches, drafting.launches) >= LEARNING_LAUNCHES and self._faster(width)
        if drafting.launches < LEARNING_LAUNCHES:
            return True
        learning = plain.launches < LEARNING_LAUNCHES
        hopeful = learning or drafting.tokens_per_second >= HOPEFUL * plain.tokens_per_second
        if untried > 0.5 and hopeful:
            return True
        if learning:
            return False
        faster = self._faster(width)
        return faster if self._due.get(width, 0) > 0 else not faster

    def tries(self, width: int, speculates: bool) -> bool:
        """Whether a launch would only try the kind that has been slower.

        Args:
            width: rows of the program.
            speculates: whether its steps draft tokens.
        """
        learnt = all(self._rate(width, kind).launches >= LEARNING_LAUNCHES for kind in (False, True))
        return learnt and speculates != self._faster(width)

    def begins_try(self, width: int, speculates: bool) -> bool:
        """Whether the launch that is planned now is the first to try the kind that has been slower.

        Args:
            width: rows of the program.
            speculates: whether its steps draft tokens.
        """
        before, self._planned = self._planned, (width, speculates)
        return before != self._planned and self.tries(width, speculates)

    def postpone(self, width: int) -> None:
        """Put off a try of drafts that have been slower, for which there is no program in memory."""
        if self.tries(width, True):
            self._due[width] = LONGEST_WAIT

    def record(
        self, width: int, speculates: bool, tokens: float, seconds: float, drafts: float | None = None
    ) -> None:
        """Learn from a launch.

        Args:
            width: rows of the program.
            speculates: whether its steps draft tokens.
            tokens: the tokens that a row emitted, on average.
            seconds: the seconds that the launch took.
            drafts: the tokens that were drafted for a row, on average; None if that is not known.
        """
        before, counts = self._faster(width), self._counts(width, speculates)
        idle = speculates and drafts == 0
        if counts:
            self._learn(width, speculates, tokens, seconds, drafts if speculates else None)
        faster = self._faster(width)
        if not counts and speculates != faster and not idle:
            return  # its next launch counts
        if speculates == faster:
            self._due[width] = self._due.get(width, 0) - 1
        else:
            wait = min(2 * self._wait.get(width, 1), LONGEST_WAIT) if faster == before else 2
            self._due[width] = self._wait[width] = wait
            self._uncounted.discard((width, speculates))

    def _learn(
        self, width: int, speculates: bool, tokens: float, seconds: float, drafts: float | None
    ) -> None:
        """Update the rates of both kinds by a launch that counts. Arguments as in `record`."""
        repeated = self._running.get(width) == speculates
        self._running[width] = speculates
        old, other = self._rate(width, speculates), self._rate(width, not speculates)
        weight = LEARNING_RATE if repeated else TRIAL_WEIGHT
        rate = old.with_launch(tokens, seconds, weight)
        self._rates[width, speculates] = rate
        if drafts is not None:
            undrafted = max(0.0, 1 - drafts / max(tokens, 1.0))
            before = self._undrafted.get(width, undrafted)
            self._undrafted[width] = before + weight * (undrafted - before)
        learnt = min(old.launches, other.launches) >= LEARNING_LAUNCHES and old.tokens_per_second > 0
        if repeated and learnt:
            speed = rate.tokens_per_second / old.tokens_per_second
            self._rates[width, not speculates] = other.scaled(speed)

    def _counts(self, width: int, speculates: bool) -> bool:
        """Whether a launch is of the same kind as the one before; of the others, every second counts.

        Args:
            width: rows of the program.
            speculates: whether its steps draft tokens.
        """
        program = width, speculates
        repeated, self._latest = program == self._latest, program
        learning = self._rate(width, speculates).launches < LEARNING_LAUNCHES
        if repeated or learning or program in self._uncounted:
            self._uncounted.discard(program)
            return True
        self._uncounted.add(program)
        return False

    def _rate(self, width: int, speculates: bool) -> Rate:
        return self._rates.get((width, speculates), Rate())

    def _drafting(self, width: int) -> Rate:
        """The rate of launches with drafts, at most what it would be if all drafts were accepted."""
        rate, plain = self._rate(width, True), self._rate(width, False)
        undrafted = PASS_COST * self._undrafted.get(width, 0.0)
        if plain.launches < LEARNING_LAUNCHES or undrafted == 0:
            return rate
        most = plain.tokens_per_second / undrafted
        return rate._replace(tokens_per_second=min(rate.tokens_per_second, most))

    def _faster(self, width: int) -> bool:
        """The kind of launch with the higher rate: whether it drafts."""
        return self._drafting(width).tokens_per_second >= self._rate(width, False).tokens_per_second
