"""Records of drafts are the engine's drafts, and the replayed law is the engine's law."""

from functools import cache as once
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.harness.paths import RESULTS
from benchmarks.speculation.lengths.fixed import FixedLength, endless
from benchmarks.speculation.signals.measure import Costs, law_of, pass_costs, priced, replayed
from benchmarks.speculation.signals.names import (
    DRAFT_ENTROPY,
    HEAD,
    POSITION,
    PREVIOUS,
    PRUNED,
    SHUFFLED,
    SUFFIX,
    TOP_PROBABILITY,
)
from benchmarks.speculation.signals.recording import MOST_TOKENS, num_accepted, record, recorders
from benchmarks.speculation.signals.signals import GAMMA, adaedl, drafts_of
from entropic_jax import allocate, chain, generate, parameters, start
from entropic_jax.speculation import (
    PassCosts,
    Speculator,
    head_drafter,
    make_speculator,
    pruned_drafter,
    suffix_drafter,
)
from entropic_jax.speculation.pruned import WINDOW
from tests.speculation.test_head import headed
from tests.tiny import prompts

POSITIONS, CONTEXT, PAGE = 24, 128, 8
SIZES = 1, 2, 4, 8, 16
COSTS = Costs(
    PassCosts(SIZES, (1.0, 1.1, 1.2, 1.4, 1.9), SIZES, (0.001,) * 5, (0.15, 1e-3), 0, (0.1, 0.0)), SIZES
)


def begin(speculator: Any) -> Any:
    decoder, params = headed()
    (prompt,) = prompts(20)
    return start(
        decoder,
        params,
        chain(),
        allocate(decoder.shape, 1, CONTEXT, page_size=PAGE),
        [prompt[:12] + prompt[:8]],
        key=jax.random.key(7),
        max_tokens=POSITIONS + MOST_TOKENS,
        sample=parameters(1, temperature=0.7),
        speculator=speculator,
    )


@once
def recorded():
    """The text that was recorded, and its records."""
    decoder, params = headed()
    state = begin(make_speculator("head", 1, MOST_TOKENS))
    suffix = suffix_drafter(MOST_TOKENS)
    _, steps = record(decoder, params, suffix, recorders(True), state, POSITIONS + MOST_TOKENS)
    steps = jax.device_get(steps)
    return steps.token.tolist(), steps


def engine(speculator: Any) -> tuple[list[int], list[int], list[int]]:
    """A text by the engine; of each pass, the tokens verified and those accepted."""
    decoder, params = headed()
    _, trace = generate(decoder, params, chain(), begin(speculator), 64, speculator=speculator)
    emitted = np.asarray(trace.emitted[:, 0])
    text = np.asarray(trace.token)[emitted, 0].tolist()
    first = ~np.asarray(trace.from_draft)[emitted, 0]
    starts = np.flatnonzero(first).tolist()
    accepted = (np.diff([*starts, len(text)]) - 1).tolist()
    return text, np.asarray(trace.num_drafted)[emitted, 0][first].tolist(), accepted


def drafter_of(name: str) -> Any:
    """The product's drafter."""
    law = COSTS.law
    if name == SUFFIX:
        return suffix_drafter(MOST_TOKENS)
    if name == HEAD:
        return head_drafter(MOST_TOKENS, law, COSTS.passes.head_step_costs(1))
    return pruned_drafter(MOST_TOKENS, WINDOW, law, COSTS.passes.draft_step_costs(1), 0)


def records(name: str):
    text, steps = recorded()
    return drafts_of(name, text, steps, POSITIONS, 0)


@pytest.mark.exhaustive
def test_the_recorded_text_is_that_of_plain_decoding():
    assert recorded()[0] == engine(None)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [HEAD, SUFFIX, PRUNED])
def test_the_engine_accepts_what_the_records_say(name):
    law = FixedLength(COSTS.law.costs, widths=SIZES)
    text, verified, accepted = engine(Speculator(endless(drafter_of(name)), law, longest_rest=0))
    assert text == recorded()[0]
    drafts, position, passes = records(name).drafts, 0, 0
    for offered, number in zip(verified, accepted, strict=True):
        if position >= POSITIONS:
            break
        assert offered == drafts.offered[position]
        assert number == drafts.accepted[position]
        position, passes = position + number + 1, passes + 1
    assert position >= POSITIONS and passes > 1
    if name == PRUNED:
        assert max(accepted) > 1 and passes > 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [PRUNED, SUFFIX, HEAD])
def test_the_replayed_law_drafts_as_the_engine_does(name):
    decoder, params = headed()
    of_text = records(name)
    (drafts,) = priced(name, [of_text], COSTS)
    replay = replayed(
        law_of(name, SimpleNamespace(decoder=decoder, params=params), COSTS), name, of_text, drafts
    )
    _, verified, accepted = engine(Speculator(drafter_of(name), COSTS.law))
    ends = np.cumsum([number + 1 for number in accepted])
    # Near the end of the records the replay drafts less, since it ends there.
    before = int((ends <= POSITIONS - MOST_TOKENS + 5).sum())
    assert before > 1 and replay.verified[:before] == verified[:before]
    assert replay.seconds >= len(replay.verified) * 1.0


@pytest.mark.slow
def test_signals_are_those_of_the_drafts():
    of_text = records(PRUNED)
    signals = of_text.drafts.signals
    entropy = -signals[DRAFT_ENTROPY]
    assert (entropy >= 0).all() and (entropy <= np.log(96) + 1e-4).all() and entropy.std() > 0.1
    top = signals[TOP_PROBABILITY]
    # The entropy is at least that of the likeliest token, and at most that of the rest spread evenly.
    assert (entropy >= -np.log(top) - 1e-4).all()
    rest = np.maximum(1 - top, 1e-12)
    assert (entropy <= -top * np.log(top) - rest * np.log(rest / 95) + 1e-3).all()
    np.testing.assert_array_equal(signals[PREVIOUS][:, 1:], signals[DRAFT_ENTROPY][:, :-1])
    assert (np.diff(signals[POSITION], axis=1) == -1).all()
    shuffled = signals[f"{SHUFFLED} 0"]
    assert (np.sort(shuffled, 0) == np.sort(signals[DRAFT_ENTROPY], 0)).all() and (shuffled != -entropy).any()


def test_the_bound_of_adaedl():
    assert adaedl(np.array([0.0, 1.0, 5.0])) == pytest.approx([1.0, 1 - GAMMA**0.5, 0.0])


def test_a_draft_is_accepted_as_far_as_the_text_has_it():
    text = np.array([5, 6, 7, 8, 9])
    tokens = np.array([[5, 6, 0], [6, 7, 8], [0, 8, 9]])
    assert num_accepted(tokens, np.array([3, 2, 3]), text).tolist() == [2, 2, 0]


def test_costs_are_taken_from_stored_results_and_ascend_with_the_size_of_a_pass():
    options: Any = SimpleNamespace(costs=RESULTS / "speculation-intel-xeon-processor.json")
    passes, machine = pass_costs(options, headed()[0], {})
    assert passes.valid() and "Xeon" in machine
    compiled, every = (Costs(passes, sizes) for sizes in (SIZES, tuple(range(1, MOST_TOKENS + 2))))
    length = np.array([512, 7936])
    seconds = compiled.verify_seconds(length)
    assert seconds.shape == (2, MOST_TOKENS + 1) and (seconds[1] > seconds[0]).all()
    # Five tokens and the last one take a pass of eight where there is none of six.
    assert (seconds[:, 5] == seconds[:, 7]).all() and (seconds[:, 3] < seconds[:, 4]).all()
    exact = every.verify_seconds(length)
    assert (np.diff(exact, axis=1) > 0).all() and (exact <= seconds + 1e-9).all()
    np.testing.assert_allclose(exact[:, [0, 1, 3, 7, 15]], seconds[:, [0, 1, 3, 7, 15]], rtol=1e-5)
    steps = {name: compiled.step_seconds(name, length) for name in (SUFFIX, PRUNED, HEAD)}
    assert (steps[SUFFIX] == 0).all() and (steps[HEAD] < steps[PRUNED]).all()
