"""What the host wants changed on the board, gathered into commands of one size."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from entropic_jax.state import PREFILLING, RUNNING

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
    WHOLE_NUMBERS,
    UpdateBatch,
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
    ready: bool  # nothing of the text is left to read but the token
    gains: np.ndarray
    penalised: tuple[tuple[int, ...], list[int]] | None  # prompt and generated tokens, for the penalties
    branches: int = 0  # that it may have; 0: it does not search


class StateUpdates:
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
        self.retained_pages: list[int] = []
        self.freed_rows: list[int] = []
        self.released_pages: list[int] = []
        self.placements: list[Placement] = []

    def __bool__(self) -> bool:
        return bool(self.retained_pages or self.freed_rows or self.released_pages or self.placements)

    def batches(self) -> Iterator[UpdateBatch]:
        """The commands that make these edits, which are forgotten."""
        retained, ended, dropped, placed = (
            self.retained_pages,
            self.freed_rows,
            self.released_pages,
            self.placements,
        )
        self._clear()
        while len(retained) > MOVED:
            yield self._batch(retained[:MOVED], (), (), ())
            retained = retained[MOVED:]
        plain = [p for p in placed if p.penalised is None]
        penalised = [p for p in placed if p.penalised is not None]
        yield self._batch(retained, ended, dropped[:MOVED], plain[:PLACES])
        rest = [((), plain[i : i + PLACES]) for i in range(PLACES, len(plain), PLACES)]
        rest += [((), penalised[i : i + PLACES]) for i in range(0, len(penalised), PLACES)]
        late = [(dropped[i : i + MOVED], ()) for i in range(MOVED, len(dropped), MOVED)]
        for pages, places in itertools.chain(late, rest):
            yield self._batch((), (), pages, places)

    def blank(self, penalised: bool) -> UpdateBatch:
        """Commands that change nothing."""
        integers = np.zeros((PLACES, INTEGERS), np.int32)
        integers[:, ROW] = self.rows
        history = np.zeros((PLACES, self.vocabulary), bool) if penalised else None
        return UpdateBatch(
            retained_pages=np.full(MOVED, self.bin, np.int32),
            freed_rows=np.zeros(self.rows, bool),
            released_pages=np.full(MOVED, self.bin, np.int32),
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

    def _batch(self, retained: Any, ended: Any, dropped: Any, placed: Any) -> UpdateBatch:
        batch = self.blank(any(p.penalised is not None for p in placed))
        batch.retained_pages[: len(retained)] = retained
        batch.freed_rows[list(ended)] = True
        batch.released_pages[: len(dropped)] = dropped
        for place, engine_request in enumerate(placed):
            request = engine_request.request
            values = {
                ROW: engine_request.row,
                SEED: request.seed,
                TOKEN: engine_request.token,
                LIMIT: engine_request.limit,
                STATUS: RUNNING if engine_request.ready else PREFILLING,
                SHARED: len(engine_request.shared),
                BRANCHES: engine_request.branches,
            }
            batch.integers[place, list(values)] = list(values.values())
            batch.integers[place, BRANCHES + 1 :] = [getattr(request, name) for name in WHOLE_NUMBERS]
            batch.numbers[place] = [getattr(request, name) for name in NUMBERS]
            batch.stops[place, : len(engine_request.stops)] = engine_request.stops
            batch.bias_tokens[place, : len(request.logit_bias)] = list(request.logit_bias)
            batch.bias_values[place, : len(request.logit_bias)] = list(request.logit_bias.values())
            batch.pages[place, : len(engine_request.shared)] = engine_request.shared
            batch.gains[place] = engine_request.gains
            if (
                engine_request.penalised is not None
                and batch.prompt is not None
                and batch.generated is not None
            ):
                prompt, generated = engine_request.penalised
                batch.prompt[place, list(prompt)] = True
                np.add.at(batch.generated[place], generated, 1)
        return batch
