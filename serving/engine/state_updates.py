"""Host-side changes to the device state, gathered between launches and applied in batches of fixed size."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from entropic_jax.sampling import latest_of
from entropic_jax.sampling.processors import WINDOW
from entropic_jax.state import PREFILLING, RUNNING

from ..request import Request
from .device_state import (
    BRANCHES,
    FLOAT_PARAMS,
    INT_PARAMS,
    LIMIT,
    NUM_INTEGERS,
    NUM_SHARED,
    ROW,
    SEED,
    STATUS,
    TOKEN,
    UpdateBatch,
)

PLACEMENTS = 8  # sequences that one batch places, at most
PAGES = 512  # pages that one batch retains, and as many that it releases, at most
STOPS = 16  # stop tokens of a row, at most
BIASES = 300  # biased tokens of a row, at most


T = TypeVar("T")


class Placement(NamedTuple):
    """A sequence for a row."""

    row: int
    request: Request
    token: int  # the last token of the prefilled text: the first decode step reads it
    limit: int  # length at which the row is full
    stop_tokens: tuple[int, ...]
    shared_pages: list[int]
    prefilled: bool  # the shared pages hold everything before `token`, so the row can decode at once
    gains: np.ndarray
    history: tuple[tuple[int, ...], list[int]] | None  # prompt and generated tokens, for the penalties
    text: tuple[int, ...] = ()  # all tokens known, for drafters
    branches: int = 0  # that it may have; 0: it does not search
    adapter: int = 0  # 0: none


class StateUpdates:
    """Changes to be applied: pages are retained before rows are freed, rows freed before placements.

    Args:
        rows: number of rows of the batch.
        pages: number of pages of the pool.
        pages_per_row: pages of a row at most.
        gains: gains and switches of a row.
        vocabulary: tokens of the model.
    """

    def __init__(
        self,
        rows: int,
        pages: int,
        pages_per_row: int,
        gains: int,
        vocabulary: int,
        text_length: int | None = None,
        adapters: bool = False,
    ) -> None:
        """No changes.

        Args:
            rows: number of rows of the batch.
            pages: number of pages of the pool.
            pages_per_row: largest number of pages of a row.
            gains: number of gains of a row's controllers, with their switches.
            vocabulary: number of tokens.
            text_length: positions of a row's text, None where no drafter reads it.
            adapters: whether rows may have LoRA adapters.
        """
        self.text_length, self.adapters = text_length, adapters
        self.rows, self.no_page, self.pages_per_row = rows, pages, pages_per_row
        self.gains, self.vocabulary = gains, vocabulary
        self._clear()

    def _clear(self) -> None:
        self.retained_pages: list[int] = []
        self.freed_rows: list[int] = []
        self.released_pages: list[int] = []
        self.placements: list[Placement] = []

    def __bool__(self) -> bool:
        return bool(self.retained_pages or self.freed_rows or self.released_pages or self.placements)

    def batches(self) -> Iterator[UpdateBatch]:
        """Yield the batches that make the changes, which are then forgotten."""
        retained, freed, released = self.retained_pages, self.freed_rows, self.released_pages
        plain = [p for p in self.placements if p.history is None]
        penalised = [p for p in self.placements if p.history is not None]
        self._clear()
        while len(retained) > PAGES:
            yield self._batch(retained=retained[:PAGES])
            retained = retained[PAGES:]
        yield self._batch(retained, freed, released[:PAGES], plain[:PLACEMENTS])
        for pages in _split(released[PAGES:], PAGES):
            yield self._batch(released=pages)
        # Only batches with penalties carry a history, which is as wide as the vocabulary.
        for placements in (plain[PLACEMENTS:], penalised):
            for batch in _split(placements, PLACEMENTS):
                yield self._batch(placements=batch)

    def empty_batch(self, penalised: bool) -> UpdateBatch:
        """A batch that changes nothing, with room for the history of penalties if `penalised`."""
        int_params = np.zeros((PLACEMENTS, NUM_INTEGERS), np.int32)
        int_params[:, ROW] = self.rows
        history = np.zeros((PLACEMENTS, self.vocabulary), bool) if penalised else None
        return UpdateBatch(
            retained_pages=np.full(PAGES, self.no_page, np.int32),
            freed_rows=np.zeros(self.rows, bool),
            released_pages=np.full(PAGES, self.no_page, np.int32),
            int_params=int_params,
            float_params=np.ones((PLACEMENTS, len(FLOAT_PARAMS)), np.float32),
            stop_tokens=np.full((PLACEMENTS, STOPS), -1, np.int32),
            bias_tokens=np.full((PLACEMENTS, BIASES), -1, np.int32),
            bias_values=np.zeros((PLACEMENTS, BIASES), np.float32),
            shared_pages=np.full((PLACEMENTS, self.pages_per_row), self.no_page, np.int32),
            gains=np.zeros((PLACEMENTS, self.gains), np.float32),
            prompt_history=history,
            generated_history=None if history is None else history.astype(np.int32),
            latest_history=None if history is None else np.zeros((PLACEMENTS, WINDOW + 1), np.int32),
            text=None if self.text_length is None else np.zeros((PLACEMENTS, self.text_length), np.int32),
            adapter=np.zeros(PLACEMENTS, np.int32) if self.adapters else None,
        )

    def _batch(
        self,
        retained: Sequence[int] = (),
        freed: Sequence[int] = (),
        released: Sequence[int] = (),
        placements: Sequence[Placement] = (),
    ) -> UpdateBatch:
        batch = self.empty_batch(any(p.history is not None for p in placements))
        batch.retained_pages[: len(retained)] = retained
        batch.freed_rows[list(freed)] = True
        batch.released_pages[: len(released)] = released
        for index, placement in enumerate(placements):
            _write(batch, index, placement)
        return batch


def _split(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (values[begin : begin + size] for begin in range(0, len(values), size))


def _write(batch: UpdateBatch, index: int, placement: Placement) -> None:
    request, shared = placement.request, placement.shared_pages
    values = {
        ROW: placement.row,
        SEED: request.seed,
        TOKEN: placement.token,
        LIMIT: placement.limit,
        STATUS: RUNNING if placement.prefilled else PREFILLING,
        NUM_SHARED: len(shared),
        BRANCHES: placement.branches,
    }
    batch.int_params[index, list(values)] = list(values.values())
    batch.int_params[index, BRANCHES + 1 :] = [getattr(request, name) for name in INT_PARAMS]
    batch.float_params[index] = [getattr(request, name) for name in FLOAT_PARAMS]
    batch.stop_tokens[index, : len(placement.stop_tokens)] = placement.stop_tokens
    batch.bias_tokens[index, : len(request.logit_bias)] = list(request.logit_bias)
    batch.bias_values[index, : len(request.logit_bias)] = list(request.logit_bias.values())
    batch.shared_pages[index, : len(shared)] = shared
    batch.gains[index] = placement.gains
    if batch.text is not None:
        batch.text[index, : len(placement.text)] = placement.text
    if batch.adapter is not None:
        batch.adapter[index] = placement.adapter
    if (
        placement.history is not None
        and batch.prompt_history is not None
        and batch.generated_history is not None
        and batch.latest_history is not None
    ):
        prompt, generated = placement.history
        batch.prompt_history[index, list(prompt)] = True
        np.add.at(batch.generated_history[index], generated, 1)
        text = (*prompt, *generated)
        batch.latest_history[index] = [*latest_of(text), len(text)]
