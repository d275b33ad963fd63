"""The pruned drafter's economics: it drafts as long as a token is worth more than the time it takes."""

import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.speculation import DraftLength, PassCosts, pruned_drafter

WIDTHS = (1, 2, 4, 8)


def law(seconds: tuple[float, ...], slopes: tuple[float, ...]) -> DraftLength:
    return PassCosts(WIDTHS, seconds, WIDTHS, slopes).law(1, WIDTHS)


def least(drafter, length: int, rows: int = 1) -> np.ndarray:
    return np.asarray(drafter.least_reach(jnp.ones(rows, bool), jnp.full(rows, length)))


def test_without_costs_every_token_is_drafted():
    assert (least(pruned_drafter(), 8000) == 0).all()


def test_nothing_is_drafted_where_a_draft_costs_a_whole_pass():
    drafter = pruned_drafter(law=law((1.0, 1.1, 1.2, 1.5), (0.0,) * 4))
    assert np.isinf(least(drafter, 8000)).all()


def test_long_contexts_pay():
    drafter = pruned_drafter(law=law((1.0, 1.1, 1.2, 1.5), (1e-3,) * 4))
    assert np.isinf(least(drafter, 100)).all()
    assert (least(drafter, 8000) < 1).all()


@pytest.mark.parametrize("length", [500, 2000, 8000])
def test_at_the_mean_acceptance_the_length_is_the_one_of_the_best_rate(length):
    drafter = pruned_drafter(law=law((1.0, 1.2, 1.8, 3.5), (1e-3, 1.1e-3, 1.4e-3, 2.5e-3)))
    mean = float(jnp.mean(drafter.acceptance))
    verify = np.interp(np.arange(1, 9), WIDTHS, drafter.law.pass_costs(length))
    step = float(drafter.law.pass_costs(drafter.kept * length)[0])
    rates = [sum(mean**i for i in range(n + 1)) / (n * step + verify[n]) for n in range(8)]
    reach, number = least(drafter, length), 0
    while number < 7 and mean**number >= reach[number]:
        number += 1
    assert rates[number] == pytest.approx(max(rates), rel=0.02)
