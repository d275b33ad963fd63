"""Batches of changes to the device state: every change is in one of them, none is in two, in order."""

import numpy as np
import pytest

from entropic_jax.serving.engine.state_updates import PAGES, PLACEMENTS, Placement, StateUpdates
from entropic_jax.serving.request import Request

ROWS, POOL = 4 * PLACEMENTS, 4 * PAGES
HISTORY = ((1, 2), [5, 5])


def gathered(retained: int = 0, released: int = 0, plain: int = 0, penalised: int = 0) -> list:
    """The batches of so many changes; penalised rows come first."""
    updates = StateUpdates(rows=ROWS, pages=POOL, pages_per_row=8, gains=3, vocabulary=10)
    updates.retained_pages += range(retained)
    updates.released_pages += range(released)
    for row in range(penalised + plain):
        history = HISTORY if row < penalised else None
        gains = np.full(3, row, np.float32)
        updates.placements.append(
            Placement(row, Request(prompt=""), 9, 99, (0,), [row], True, gains, history)
        )
    assert updates or not (retained or released or plain or penalised)
    batches = list(updates.batches())
    assert not updates
    return batches


def pages_of(batches: list, field: str) -> list[list[int]]:
    return [pages[pages < POOL].tolist() for pages in (getattr(batch, field) for batch in batches)]


def split(values: list[int], size: int) -> list[list[int]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


@pytest.mark.parametrize("number", [0, 1, PAGES - 1, PAGES, PAGES + 1, 2 * PAGES, 2 * PAGES + 1, 3 * PAGES])
def test_every_page_is_retained_and_released_once(number):
    expected = split(list(range(number)), PAGES) or [[]]
    assert pages_of(gathered(retained=number), "retained_pages") == expected
    assert pages_of(gathered(released=number), "released_pages") == expected


def test_pages_are_retained_before_any_is_released():
    batches = gathered(retained=PAGES + 1, released=PAGES + 1, plain=1)
    pages = list(range(PAGES + 1))
    assert pages_of(batches, "retained_pages") == [pages[:PAGES], pages[PAGES:], []]
    assert pages_of(batches, "released_pages") == [[], pages[:PAGES], pages[PAGES:]]


@pytest.mark.parametrize("plain", [0, 1, PLACEMENTS, PLACEMENTS + 1, 2 * PLACEMENTS + 1])
@pytest.mark.parametrize("penalised", [0, 1, PLACEMENTS + 1])
def test_every_sequence_is_placed_once(plain, penalised):
    rows = list(range(penalised + plain))
    expected = split(rows[penalised:], PLACEMENTS) or [[]]
    expected += split(rows[:penalised], PLACEMENTS)
    batches = gathered(plain=plain, penalised=penalised)
    assert len(batches) == len(expected)
    for batch, placed in zip(batches, expected, strict=True):
        assert batch.int_params[:, 0].tolist() == placed + [ROWS] * (PLACEMENTS - len(placed))
        assert batch.shared_pages[: len(placed), 0].tolist() == placed
        assert batch.gains[: len(placed), 0].tolist() == placed
        is_penalised = bool(placed) and placed[0] < penalised
        assert (batch.prompt_history is not None) == is_penalised
        if is_penalised:
            assert np.flatnonzero(batch.prompt_history.any(0)).tolist() == [1, 2]
            assert batch.generated_history[:, 5].tolist() == [2] * len(placed) + [0] * (
                PLACEMENTS - len(placed)
            )
