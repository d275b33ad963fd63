"""The choice between launches with and without drafts follows what each has been measured to emit."""

import numpy as np
import pytest

from entropic_jax.serving.engine.draft_choice import LONGEST_WAIT, DraftChoice


def kinds(choice, launches, tokens, untried=0.0, width=8, drafts=None, seconds=lambda: 1.0):
    """The kinds of that many launches, whose rows emit so many tokens in a second, by kind."""
    chosen = []
    for _ in range(launches):
        speculates = choice.drafts(width, untried)
        choice.record(width, speculates, tokens[speculates], seconds(), drafts)
        chosen.append(speculates)
    return chosen


@pytest.mark.parametrize(("drafting", "plain"), [(2.0, 1.0), (1.0, 2.0)])
def test_the_slower_kind_is_tried_seldom(drafting, plain):
    chosen = kinds(DraftChoice(), 300, {True: drafting, False: plain})
    tries = chosen[100:].count(drafting < plain) / 2  # the first launch of a try does not count
    assert 200 // (LONGEST_WAIT + 1) - 1 <= tries <= 200 // LONGEST_WAIT + 1


def test_the_choice_follows_a_change_of_the_texts():
    choice = DraftChoice()
    kinds(choice, 100, {True: 1.0, False: 2.0})
    assert kinds(choice, 4 * LONGEST_WAIT, {True: 6.0, False: 2.0})[-4:].count(True) >= 3


def test_a_machine_that_slows_down_makes_no_kind_look_faster():
    choice, chosen = DraftChoice(), []
    for launch in range(400):
        speculates = choice.drafts(8, 0.0)
        seconds = 2.0 if launch % 40 > 20 else 1.0  # seconds of a launch
        choice.record(8, speculates, {True: 1.6, False: 2.0}[speculates], seconds)
        chosen.append(speculates)
    assert chosen[40:].count(True) < 60


def noise(spread: float):
    """Seconds of launches that vary by a factor, in either direction."""
    random = np.random.default_rng(0)
    return lambda: float(np.exp(spread * random.standard_normal()))


def test_launches_that_would_draft_nothing_are_plain_whatever_the_clock_says():
    emitted = {True: 16.0, False: 16.0}
    chosen = kinds(DraftChoice(), 600, emitted, drafts=0.0, seconds=noise(0.3))
    assert chosen[50:].count(True) <= 550 // LONGEST_WAIT + 6
    assert kinds(DraftChoice(), 600, emitted, seconds=noise(0.3)).count(True) > 100, (
        "the noise decides nothing"
    )


def test_launches_that_draft_are_chosen_in_spite_of_noise():
    emitted = {True: 32.0, False: 16.0}
    chosen = kinds(DraftChoice(), 600, emitted, drafts=24.0, seconds=noise(0.3))
    assert chosen[50:].count(False) < 60


def test_the_choice_follows_texts_that_begin_and_cease_to_be_drafted():
    choice, machine = DraftChoice(), noise(0.1)
    kinds(choice, 100, {True: 32.0, False: 16.0}, drafts=24.0, seconds=machine)
    assert kinds(choice, 60, {True: 16.0, False: 16.0}, drafts=0.0, seconds=machine)[20:].count(True) <= 6
    kinds(choice, 4 * LONGEST_WAIT, {True: 32.0, False: 16.0}, drafts=24.0, seconds=machine)
    assert kinds(choice, 60, {True: 32.0, False: 16.0}, drafts=24.0, seconds=machine).count(True) > 50


def test_new_sequences_are_tried_with_drafts():
    choice = DraftChoice()
    kinds(choice, 100, {True: 1.96, False: 2.0})
    assert kinds(choice, 20, {True: 1.96, False: 2.0}, untried=0.8).count(True) == 20


def test_new_sequences_get_no_drafts_where_these_are_known_to_cost_too_much():
    choice = DraftChoice()
    kinds(choice, 100, {True: 1.0, False: 2.0})
    assert kinds(choice, 20, {True: 1.0, False: 2.0}, untried=0.8).count(True) <= 2


def test_a_launch_that_waited_for_its_program_does_not_count():
    choice = DraftChoice()
    choice.record(8, False, 1.0, 60.0)
    assert kinds(choice, 100, {True: 1.0, False: 2.0})[50:].count(True) < 10


def test_a_launch_that_finds_the_caches_of_the_other_kind_does_not_count():
    choice, chosen = DraftChoice(), [True]
    for launch in range(600):
        tokens = {True: 3.0 if launch < 100 else 1.5, False: 1.7}  # plain steps become the faster ones
        speculates = choice.drafts(8, 0.0)
        cold = chosen[-1] != speculates
        choice.record(8, speculates, tokens[speculates], 2.0 if cold else 1.0)
        chosen.append(speculates)
    assert chosen[10:100].count(True) > 70
    assert chosen[-300:].count(False) > 250


def test_tries_that_are_always_the_first_of_their_kind_end():
    choice = DraftChoice()
    kinds(choice, 100, {True: 1.0, False: 2.0})
    tries = 0
    for _ in range(10):  # another width between any two launches
        tries += choice.drafts(8, 0.0)
        choice.record(8, choice.drafts(8, 0.0), 1.0, 1.0)
        choice.record(4, False, 2.0, 1.0)
    assert tries <= 4


def test_buckets_are_independent():
    choice = DraftChoice()
    kinds(choice, 100, {True: 1.0, False: 2.0}, width=8)
    kinds(choice, 100, {True: 2.0, False: 1.0}, width=1)
    assert kinds(choice, 40, {True: 1.0, False: 2.0}, width=8).count(True) < 8
    assert kinds(choice, 40, {True: 2.0, False: 1.0}, width=1).count(True) > 32


def test_only_the_slower_kind_is_a_trial_once_both_are_known():
    choice = DraftChoice()
    assert not choice.tries(8, True) and not choice.tries(8, False)
    kinds(choice, 100, {True: 1.0, False: 2.0})
    assert choice.tries(8, True) and not choice.tries(8, False)
    kinds(choice, 400, {True: 4.0, False: 2.0})
    assert choice.tries(8, False) and not choice.tries(8, True)


def test_a_try_begins_with_its_first_launch():
    choice = DraftChoice()
    kinds(choice, 100, {True: 1.0, False: 2.0})
    assert choice.begins_try(8, True) and not choice.begins_try(8, True)
    assert not choice.begins_try(8, False)
    assert choice.begins_try(8, True)


@pytest.mark.parametrize("drafting", [0.5, 2.0])
def test_a_launch_that_is_not_recorded_drafts_only_where_drafts_are_known_to_be_faster(drafting):
    choice = DraftChoice()
    assert choice.drafts(8, untried=1.0)
    assert not choice.drafts(8, untried=1.0, recorded=False), "nothing is known"
    kinds(choice, 20, {True: drafting, False: 1.0})
    chosen = {choice.drafts(8, untried=0.0, recorded=False) for _ in range(2 * LONGEST_WAIT)}
    assert chosen == {drafting > 1}
