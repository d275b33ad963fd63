"""The pruned drafter's economics: it drafts as long as a token is worth more than the time it takes."""

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, generate, start
from entropic_jax.phases.batch import Batch
from entropic_jax.speculation import Cascade, Draft, DraftLength, PassCosts, Speculator, pruned_drafter
from entropic_jax.speculation.draft_length import correct
from entropic_jax.speculation.drafter import DraftRecord
from entropic_jax.state import State
from entropic_jax.state.pytree import STATIC, pytree
from tests import tiny

WIDTHS = (1, 2, 4, 8)


def law(seconds: tuple[float, ...], slopes: tuple[float, ...]) -> DraftLength:
    return PassCosts(WIDTHS, seconds, WIDTHS, slopes).law(1, WIDTHS)


def least(drafter, length: int, shift: float = 0.0) -> np.ndarray:
    going, lengths = jnp.ones(1, bool), jnp.full(1, length)
    return np.asarray(drafter.stopping(going, lengths, jnp.full(1, shift)).least_reach(going, lengths))


def test_without_costs_a_draft_ends_where_it_is_unlikely():
    drafter = pruned_drafter()
    assert (least(drafter, 8000) == np.float32(drafter.stop_below)).all()


def test_nothing_is_drafted_where_a_draft_costs_a_whole_pass():
    drafter = pruned_drafter(law=law((1.0, 1.1, 1.2, 1.5), (0.0,) * 4), step_costs=(1.0, 0.0))
    assert np.isinf(least(drafter, 8000)).all()


def test_long_contexts_pay():
    drafter = pruned_drafter(law=law((1.0, 1.1, 1.2, 1.5), (1e-3,) * 4), step_costs=(1.0, 2e-4))
    assert np.isinf(least(drafter, 100)).all()
    assert (least(drafter, 8000) < 1).all()


@pytest.mark.parametrize("length", [500, 2000, 8000])
def test_at_the_mean_acceptance_the_length_is_the_one_of_the_best_rate(length):
    passes = law((1.0, 1.2, 1.8, 3.5), (1e-3, 1.1e-3, 1.4e-3, 2.5e-3))
    drafter = pruned_drafter(law=passes, step_costs=(1.0, 1.5e-4))
    mean = drafter.mean_acceptance
    verify = np.interp(np.arange(1, 9), WIDTHS, drafter.law.pass_costs(length))
    step = 1.0 + 1.5e-4 * length
    rates = [sum(mean**i for i in range(n + 1)) / (n * step + verify[n]) for n in range(8)]
    reach, number = least(drafter, length), 0
    while number < 7 and mean**number >= reach[number]:
        number += 1
    assert rates[number] == pytest.approx(max(rates), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("costs", "drafts"), [((1.0, 1.6, 1.65, 1.7), True), ((1.0, 1.8, 3.0, 5.0), False)])
def test_a_first_token_need_not_pay_for_what_any_draft_costs(costs, drafts):
    """A pass with drafts costs much more than one without, and each further token little."""
    drafter = pruned_drafter(law=law(costs, (0.0,) * 4), step_costs=(0.3, 0.0), shortest_context=0)
    reach = least(drafter, 30)
    assert reach[0] > 1 and np.isfinite(reach[0]) == drafts and (reach[1] < 1) == drafts
    subject, speculation = tiny.model(), Speculator(drafter, drafter.law)
    state = start(
        subject.decoder,
        subject.params,
        chain(),
        allocate(subject.decoder.shape, 1, 64, page_size=8),
        [list(range(5, 35))],
        key=jax.random.key(0),
        max_tokens=4,
        speculator=speculation,
    )
    _, trace = generate(
        subject.decoder, subject.params, chain(), state, 1, capacity=1, speculator=speculation
    )
    assert (int(trace.num_drafted.sum()) > 0) == drafts


def test_rows_whose_drafts_fail_draft_less():
    drafter = pruned_drafter(law=law((1.0, 1.1, 1.2, 1.5), (1e-3,) * 4), step_costs=(1.0, 2e-4))

    def drafted(shift: float) -> int:
        mean = float(correct(jnp.float32(drafter.mean_acceptance), jnp.float32(shift)))
        return int((mean ** np.arange(7) >= least(drafter, 8000, shift)).sum())

    assert drafted(-1.0) < drafted(0.0)
    assert np.isinf(least(drafter, 8000, -4.0)).all()


def batch_of(rows: int, widths: tuple[int, ...] = WIDTHS):
    """The stopping rule of a batch: steps cost half a pass, and a little for each row's positions."""
    passes = PassCosts(WIDTHS, (1.0, 1.1, 1.3, 1.8), WIDTHS, (1e-4,) * 4).law(1, widths)
    drafter = pruned_drafter(law=passes, step_costs=(0.5, 1e-5))
    length = jnp.full(rows, 4000)
    return drafter.stopping(jnp.ones(rows, bool), length, jnp.zeros(rows)), length


def test_a_step_for_one_row_has_to_be_worth_what_it_costs_for_all():
    stopping, length = batch_of(8)
    all_rows, first_row = jnp.ones(8, bool), jnp.arange(8) == 0
    reach = jnp.full(8, 0.9)
    assert (reach >= stopping.least_reach(all_rows, length)[1]).all()
    assert stopping.pays(1, all_rows, length, reach)
    # The same row on its own would go on by the first rule, but the step is as dear for it alone.
    assert not stopping.pays(1, first_row, length, reach)
    assert not stopping.pays(1, ~all_rows, length, reach)


def test_rows_that_all_go_on_stop_by_one_rule():
    stopping, length = batch_of(4)
    going = jnp.ones(4, bool)
    for number, least_reach in enumerate(stopping.least_reach(going, length).tolist()):
        for factor, pays in ((0.999, False), (1.001, True)):
            assert bool(stopping.pays(number, going, length, jnp.full(4, factor * least_reach))) is pays


def test_no_more_is_drafted_than_the_largest_pass_verifies():
    for widths, drafted in (((1, 2, 4), 3), ((1, 2, 4, 8), 7)):
        stopping, length = batch_of(2, widths)
        least_reach = np.asarray(stopping.least_reach(jnp.ones(2, bool), length))
        assert np.isfinite(least_reach).tolist() == [n < drafted for n in range(7)]


def test_without_costs_rows_stop_each_by_its_own_reach():
    drafter = pruned_drafter()
    stopping = drafter.stopping(jnp.ones(2, bool), jnp.full(2, 4000), jnp.zeros(2))
    enough = float(drafter.stop_below) + 0.01
    assert stopping.pays(3, jnp.ones(2, bool), jnp.full(2, 4000), jnp.full(2, enough))


def test_a_step_of_many_rows_costs_as_much_more_as_a_pass():
    costs = PassCosts((1, 2, 4), (1.0, 1.5, 2.0), WIDTHS, (0.0,) * 4, (0.8, 1e-4))
    assert costs.draft_step_costs(1) == pytest.approx((0.8, 1e-4))
    assert costs.draft_step_costs(4) == pytest.approx((1.6, 1e-4))
    with pytest.raises(ValueError, match="draft_step must have been measured"):
        costs._replace(draft_step=None).draft_step_costs(1)


def record(shift: jax.Array) -> DraftRecord:
    none = jnp.zeros(shift.shape[0], jnp.int32)
    return DraftRecord(shift, none, none)


@pytree
class Says:
    """Drafts a token of a stated chance of acceptance, and counts who asks."""

    chance: jax.Array  # float32 [rows]
    rate: float = np.inf  # what it expects to reach
    most_tokens: Annotated[int, STATIC] = 1

    def expected_rate(self, model, batch):
        return jnp.float32(self.rate)

    def draft(self, model, batch, most):
        rows = batch.active.shape[0]
        return batch, Draft(
            jnp.ones((rows, 1), jnp.int32), batch.active.astype(jnp.int32), self.chance[:, None]
        )


def test_a_row_asks_the_next_drafter_where_its_draft_promises_less():
    passes = law((1.0, 1.2, 1.8, 3.5), (0.0,) * 4)
    first, second = Says(jnp.array([0.9, 0.4, 0.9])), Says(jnp.full(3, 0.8), 3 * 1.5 / 1.2)
    state = State(**dict.fromkeys(State._fields))._replace(
        length=jnp.zeros(3, jnp.int32), speculation=record(jnp.array([[0.0, 0.0], [0.0, 0.0], [-9.0, 0.0]]))
    )
    batch, draft = Cascade((first, second), passes).draft(None, Batch(state, jnp.ones(3, bool)), jnp.ones(3))
    # The third row's own record says that drafts of the first drafter fail.
    assert draft.source.tolist() == [0, 1, 1]
    assert draft.acceptance[:, 0].tolist() == pytest.approx([0.9, 0.8, 0.8])
    assert batch.state.speculation.shift.shape == (3, 2) and batch.active.all()


def test_a_drafter_of_which_less_is_expected_than_of_a_later_one_is_passed_over():
    passes, active = law((1.0, 1.2, 1.8, 3.5), (0.0,) * 4), jnp.ones(2, bool)
    state = State(**dict.fromkeys(State._fields))._replace(
        length=jnp.zeros(2, jnp.int32), speculation=record(jnp.zeros((2, 3)))
    )
    suffix, sure = Says(jnp.array([0.9, 0.4])), Says(jnp.full(2, 0.99), 2.4)
    for rate, source in ((2.8, [0, 2]), (1.5, [0, 1])):
        cascade = Cascade((suffix, sure, Says(jnp.full(2, 0.6), rate)), passes)
        _, draft = cascade.draft(None, Batch(state, active), jnp.ones(2))
        assert draft.source.tolist() == source


def test_a_step_of_a_head_costs_what_was_measured():
    costs = PassCosts((1, 2), (1.0, 1.5), WIDTHS, (0.0,) * 4, head_step=(0.2, 1e-5))
    assert costs.head_step_costs(2) == pytest.approx((0.3, 1e-5))
    assert not costs._replace(head_step=(-1.0, 0.0)).valid()
    with pytest.raises(ValueError, match="head_step must have been measured"):
        costs._replace(head_step=None).head_step_costs(1)
