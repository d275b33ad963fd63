"""What the host wants changed on the board, gathered into commands of one size."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from entropic_jax.state import READING, RUNNING

from ..request import Request
from .device_state import (
    BRANCHES,
    INTEGERS,
    LIMIT,
    NUMBERS,
    ROW,
    SEED,
    SHARED,
    STATUS,
    TOKEN,
    TOP_K,
    Commands,
)

PLACES = 8  # jobs that one command places
MOVED = 512  # pages that one command keeps, and gives up
STOPS = 16  # tokens that end a row
BIASES = 300  # tokens whose logits a request may bias


class Placement(NamedTuple):
    """A job for a row."""

    row: int
    request: Request
    token: int  # the last of the text so far: the first step reads it
    limit: int  # length at which the row is full
    stops: tuple[int, ...]
    shared: list[int]  # pages
    read: bool  # nothing of the text is left to read but the token
    gains: np.ndarray
    penalised: tuple[tuple[int, ...], list[int]] | None  # prompt and generated tokens, for the penalties
    branches: int = 0  # that it may have; 0: it does not search


class Edits:
    """Edits for the next commands. Pages are kept before rows end, and rows end before jobs are placed."""

    def __init__(self, rows: int, pages: int, per_row: int, gains: int, vocabulary: int) -> None:
        self.rows, self.bin, self.per_row, self.gains, self.vocabulary = (
            rows,
            pages,
            per_row,
            gains,
            vocabulary,
        )
        self._clear()

    def _clear(self) -> None:
        self.retained: list[int] = []
        self.ended: list[int] = []
        self.dropped: list[int] = []
        self.placed: list[Placement] = []

    def __bool__(self) -> bool:
        return bool(self.retained or self.ended or self.dropped or self.placed)

    def take(self) -> Iterator[Commands]:
        """The commands that make these edits, which are forgotten."""
        retained, ended, dropped, placed = self.retained, self.ended, self.dropped, self.placed
        self._clear()
        while len(retained) > MOVED:
            yield self._commands(retained[:MOVED], (), (), ())
            retained = retained[MOVED:]
        plain = [p for p in placed if p.penalised is None]
        penalised = [p for p in placed if p.penalised is not None]
        yield self._commands(retained, ended, dropped[:MOVED], plain[:PLACES])
        rest = [((), plain[i : i + PLACES]) for i in range(PLACES, len(plain), PLACES)]
        rest += [((), penalised[i : i + PLACES]) for i in range(0, len(penalised), PLACES)]
        late = [(dropped[i : i + MOVED], ()) for i in range(MOVED, len(dropped), MOVED)]
        for pages, places in itertools.chain(late, rest):
            yield self._commands((), (), pages, places)

    def blank(self, penalised: bool) -> Commands:
        """Commands that change nothing."""
        integers = np.zeros((PLACES, INTEGERS), np.int32)
        integers[:, ROW] = self.rows
        history = np.zeros((PLACES, self.vocabulary), bool) if penalised else None
        return Commands(
            retained=np.full(MOVED, self.bin, np.int32),
            ended=np.zeros(self.rows, bool),
            dropped=np.full(MOVED, self.bin, np.int32),
            integers=integers,
            numbers=np.ones((PLACES, len(NUMBERS)), np.float32),
            stops=np.full((PLACES, STOPS), -1, np.int32),
            bias_tokens=np.full((PLACES, BIASES), -1, np.int32),
            bias_values=np.zeros((PLACES, BIASES), np.float32),
            pages=np.full((PLACES, self.per_row), self.bin, np.int32),
            gains=np.zeros((PLACES, self.gains), np.float32),
            prompt=history,
            generated=None if history is None else history.astype(np.int32),
        )

    def _commands(self, retained: Any, ended: Any, dropped: Any, placed: Any) -> Commands:
        made = self.blank(any(p.penalised is not None for p in placed))
        made.retained[: len(retained)] = retained
        made.ended[list(ended)] = True
        made.dropped[: len(dropped)] = dropped
        for place, job in enumerate(placed):
            request = job.request
            values = {
                ROW: job.row,
                SEED: request.seed,
                TOKEN: job.token,
                LIMIT: job.limit,
                STATUS: RUNNING if job.read else READING,
                SHARED: len(job.shared),
                TOP_K: request.top_k,
                BRANCHES: job.branches,
            }
            made.integers[place, list(values)] = list(values.values())
            made.numbers[place] = [getattr(request, name) for name in NUMBERS]
            made.stops[place, : len(job.stops)] = job.stops
            made.bias_tokens[place, : len(request.logit_bias)] = list(request.logit_bias)
            made.bias_values[place, : len(request.logit_bias)] = list(request.logit_bias.values())
            made.pages[place, : len(job.shared)] = job.shared
            made.gains[place] = job.gains
            if job.penalised is not None and made.prompt is not None and made.generated is not None:
                prompt, generated = job.penalised
                made.prompt[place, list(prompt)] = True
                np.add.at(made.generated[place], generated, 1)
        return made
