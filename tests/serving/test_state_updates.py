"""Batches of changes to the device state: every change is in one of them, none is in two, in order."""

import numpy as np
import pytest

from entropic_jax.serving.engine.device_state import (
    BRANCHES,
    FLOAT_PARAMS,
    INT_PARAMS,
    LIMIT,
    NUM_SHARED,
    ROW,
    SEED,
    STATUS,
    TOKEN,
)
from entropic_jax.serving.engine.state_updates import PAGES, PLACEMENTS, Placement, StateUpdates
from entropic_jax.serving.request import Request
from entropic_jax.state import PREFILLING, RUNNING

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


def test_a_placement_is_written_in_full():
    updates = StateUpdates(ROWS, POOL, 8, 3, vocabulary=10, text_length=6, adapters=True)
    first = Request(prompt="", seed=7, temperature=0.3, top_k=5, logit_bias={3: 1.5, 4: -2.0})
    gains = np.array([1, 2, 3], np.float32)
    history = ((1, 1), [5, 5, 6])
    updates.placements = [
        Placement(2, first, 9, 99, (8, 6), [4, 1], True, gains, history, (3, 9), branches=4, adapter=2),
        Placement(3, Request(prompt="", seed=11), 1, 50, (), [], False, gains + 1, history),
    ]
    *_, batch = updates.batches()
    assert batch.int_params[:3, ROW].tolist() == [2, 3, ROWS]
    assert batch.int_params[:2, STATUS].tolist() == [RUNNING, PREFILLING]
    assert batch.int_params[:2, SEED].tolist() == [7, 11] and batch.int_params[:2, TOKEN].tolist() == [9, 1]
    assert batch.int_params[:2, LIMIT].tolist() == [99, 50]
    assert batch.int_params[:2, NUM_SHARED].tolist() == [2, 0]
    assert batch.int_params[:2, BRANCHES].tolist() == [4, 0]
    assert batch.int_params[0, BRANCHES + 1 :].tolist() == [getattr(first, name) for name in INT_PARAMS]
    expected = np.float32([getattr(first, name) for name in FLOAT_PARAMS])
    np.testing.assert_array_equal(batch.float_params[0], expected)
    assert batch.stop_tokens[0, :3].tolist() == [8, 6, -1] and (batch.stop_tokens[1:] == -1).all()
    assert batch.bias_tokens[0, :3].tolist() == [3, 4, -1] and (batch.bias_tokens[1:] == -1).all()
    assert batch.bias_values[0, :3].tolist() == [1.5, -2.0, 0.0] and not batch.bias_values[1:].any()
    assert batch.shared_pages[0, :3].tolist() == [4, 1, POOL] and (batch.shared_pages[1:] == POOL).all()
    assert batch.gains[:3].tolist() == [[1, 2, 3], [2, 3, 4], [0, 0, 0]]
    assert batch.text.shape == (PLACEMENTS, 6) and batch.text[0].tolist() == [3, 9, 0, 0, 0, 0]
    assert batch.adapter[:3].tolist() == [2, 0, 0]
    assert batch.prompt_history[:3].sum(1).tolist() == [1, 1, 0]
    assert batch.generated_history[0].tolist() == [0, 0, 0, 0, 0, 2, 1, 0, 0, 0]


def test_what_a_batch_has_no_room_for_is_left_out():
    updates = StateUpdates(ROWS, POOL, 8, 3, vocabulary=10)
    batch = updates.empty_batch(penalised=False)
    assert batch.text is batch.adapter is batch.prompt_history is batch.generated_history is None
    assert not updates
    batch = StateUpdates(ROWS, POOL, 8, 3, 10, text_length=6, adapters=True).empty_batch(penalised=True)
    assert batch.prompt_history.shape == batch.generated_history.shape == (PLACEMENTS, 10)
    assert (batch.int_params[:, ROW] == ROWS).all() and not batch.freed_rows.any()
    assert (batch.retained_pages == POOL).all() and (batch.released_pages == POOL).all()
    assert batch.retained_pages.shape == batch.released_pages.shape == (PAGES,)
