"""Rests: plain steps in place of passes, while drafters have nothing to offer."""

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, generate, parameters, start
from entropic_jax.speculation import Draft, DraftLength, PassPlan, Speculator, num_resting, rested
from entropic_jax.state import RUNNING, STOPPED, State
from entropic_jax.state.constraints import no_constraints
from entropic_jax.state.pytree import STATIC, pytree
from tests import tiny

WIDTHS = (1, 2)
MODEL = tiny.model()


@pytree
class Wrong:
    """Drafts a token that no model emits, or nothing."""

    offers: bool | jax.Array = False
    most_tokens: Annotated[int, STATIC] = 1

    def draft(self, model, batch, max_drafts):
        rows = batch.active.shape[0]
        number = jnp.where(self.offers, jnp.minimum(max_drafts, 1), 0)
        return batch, Draft(jnp.full((rows, 1), -2, jnp.int32), number, jnp.full((rows, 1), 0.9))


def speculator(offers: bool = False, longest_rest: int = 16) -> Speculator:
    return Speculator(Wrong(jnp.asarray(offers)), DraftLength(jnp.ones(2), widths=WIDTHS), longest_rest)


def plan(drafted: list[int]) -> PassPlan:
    rows = len(drafted)
    draft = Draft(
        jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32), jnp.full((rows, 1), 0.5), jnp.int32(0)
    )
    return PassPlan(draft, jnp.asarray(drafted, jnp.int32), jnp.int32(0))


def state(rest: list[int], status: list[int] | None = None) -> State:
    record = speculator().init(len(rest))._replace(rest=jnp.asarray(rest, jnp.int32))
    action = start(
        MODEL.decoder,
        MODEL.params,
        chain(),
        allocate(MODEL.decoder.shape, len(rest), 8),
        [[1]] * len(rest),
        key=jax.random.key(0),
        max_tokens=1,
    ).action
    empty = State(**dict.fromkeys(State._fields))
    status = jnp.asarray(status or [RUNNING] * len(rest), jnp.int32)
    return empty._replace(status=status, action=action, speculation=record)


def test_rests_grow_while_nothing_is_drafted_and_end_with_a_draft():
    drafts, active = speculator(), jnp.asarray([True, True, False])
    record, rests = drafts.init(3), []
    for _ in range(9):
        record = drafts.learn(record, active, plan([0, 1, 0]), jnp.zeros(3, jnp.int32))
        rests.append(record.rest.tolist())
    assert [rest[0] for rest in rests] == [0, 0, 0, 2, 4, 8, 16, 16, 16]
    assert all(rest[1:] == [0, 0] for rest in rests)
    record = drafts.learn(record, active, plan([1, 1, 0]), jnp.zeros(3, jnp.int32))
    assert record.rest.tolist() == [0, 0, 0] and record.idle.tolist() == [0, 0, 0]


def test_a_batch_rests_as_long_as_its_row_that_rests_least():
    assert num_resting(state([4, 2])) == 2 and num_resting(state([4, 0])) == 0
    assert num_resting(state([4, 0], [RUNNING, STOPPED])) == 4
    assert num_resting(rested(state([4, 2]))) == 1


def test_a_row_whose_tokens_the_host_expects_does_not_rest():
    free = no_constraints(2, 32, positions=2)
    awaited = free._replace(
        masked=jnp.asarray([True, False]), expected=jnp.asarray([[5, 6], [-1, -1]], jnp.int32)
    )
    assert num_resting(state([4, 2]), free) == 2 and num_resting(state([4, 2]), awaited) == 0


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3, 64])
def test_rests_end_however_short_launches_are(steps):
    """Drafters are asked after 0, 1, 2, 3, 6, 11, 20, 37 … tokens; texts are those of plain decoding."""

    def begin(drafts):
        return start(
            MODEL.decoder,
            MODEL.params,
            chain(),
            allocate(MODEL.decoder.shape, 1, 64, page_size=8),
            [[3, 1, 4]],
            key=jax.random.key(5),
            max_tokens=40,
            sample=parameters(1, temperature=1.0),
            speculator=drafts,
        )

    def run(drafts):
        current, tokens = begin(drafts), []
        while int(current.status[0]) == RUNNING:
            current, trace = generate(
                MODEL.decoder, MODEL.params, chain(), current, steps, capacity=64, speculator=drafts
            )
            tokens += np.asarray(trace.token)[np.asarray(trace.emitted)].tolist()
        return tokens, current

    text, ended = run(speculator())
    assert text == run(None)[0] and len(text) == 40
    assert ended.speculation.idle.tolist() == [8]
    assert run(speculator(longest_rest=0))[1].speculation.idle.tolist() == [40]
    assert run(speculator(offers=True))[1].speculation.idle.tolist() == [1]  # none is drafted past the limit
