"""The studies of an ablation; one prefill of a prompt serves every configuration."""

import jax
import numpy as np
import pytest

from entropic_jax.analysis import ablation, studies, tables
from entropic_jax.analysis.ablation import Subject
from entropic_jax.analysis.studies import EQUIVALENT_PRESETS, Workload
from entropic_jax.control import chain
from entropic_jax.methods.presets import PRESETS, Gains
from entropic_jax.state.cache import check
from tests import tiny


def subject() -> Subject:
    m = tiny.model()
    return Subject(m.decoder, m.params)


def workload() -> Workload:
    stream = np.random.default_rng(0).integers(0, 96, 2000)
    return Workload(
        subject(),
        stream,
        3.0,
        Gains(dropped_mass_limit=0.5, lowest_dropped_mass_limit=0.3, low_entropy=0.5, high_entropy=4.0),
    )


@pytest.mark.slow
def test_merged_pages_hold_what_their_parts_held():
    texts = [t[0] for t in (tiny.prompts(75, seed=1), tiny.prompts(75, seed=2))]
    fine = ablation.prefill(subject(), [t[:-8] for t in texts], 9, page_size=4)
    coarse = ablation.prefill(subject(), [t[:-8] for t in texts], 9, page_size=16)
    merged = ablation.resume(fine, chain(), page_size=16)
    check(merged.cache)
    tables = (
        np.asarray(merged.cache.table)[:, :4],
        np.asarray(coarse.cache.table)[:, :4],
    )  # 67 of 80 positions
    for layer, other in zip(merged.cache.layers, coarse.cache.layers, strict=True):
        for name in ("key_min", "key_max", "key_sum", "value_norm", "keys", "values"):
            actual, expected = (
                np.asarray(getattr(x, name))[w] for x, w in zip((layer, other), tables, strict=True)
            )
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    tails = [t[-8:] for t in texts]
    scores = [
        ablation.forced(subject(), chain(), ablation.resume(s, chain()), tails).surprisal
        for s in (fine, coarse, merged)
    ]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)
    np.testing.assert_allclose(scores[2], scores[1], atol=1e-4)


def test_pages_merge_into_multiples_only():
    state = ablation.prefill(subject(), tiny.prompts(20), 4, page_size=16)
    with pytest.raises(ValueError, match=r"page_size must be a multiple of 16, .*; got 24"):
        ablation.resume(state, chain(), page_size=24)


@pytest.mark.slow
def test_a_state_serves_every_configuration_and_stays_whole():
    small = workload()
    state = ablation.prefill(small.subject, tiny.prompts(40), 24)
    before = jax.device_get(state.cache)
    texts = {}
    for name in ("off", "full-lossy", "off"):
        setting = small.preset(name)
        written = ablation.write(
            small.subject, setting, studies.set_up(state, setting), target=1.0, clips=(0.3, 1.2)
        )
        texts.setdefault(name, []).append(written.tokens)
    assert texts["off"][0] == texts["off"][1] and len(texts["full-lossy"][0][0]) == 24
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.cache), before)


@pytest.mark.exhaustive
def test_under_teacher_forcing_temperature_and_schedule_change_nothing():
    rows = studies.quality(workload(), 420, 0, names=PRESETS, sequences=2, scored=24)
    by_preset = {r["preset"]: {k: v for k, v in r.items() if k != "preset"} for r in rows}
    for name, same in EQUIVALENT_PRESETS.items():
        assert by_preset[name] == by_preset[same]
    assert by_preset["off"]["kept"] == 1 and by_preset["meso-lossy"]["kept"] < 1
    assert by_preset["meso-lossy"]["bytes_read"] < by_preset["off"]["bytes_read"]
    title, head, lines = tables.quality(rows)
    assert len(lines) == len(PRESETS) and all(len(line) == len(head) for line in lines)


@pytest.mark.exhaustive
def test_speed_takes_turns():
    rows = studies.speed(workload(), 60, names=("off", "meso-lossy"), steps=4, repeat=3)
    assert [r["preset"] for r in rows[:4]] == ["off", "meso-lossy", "meso-lossy", "off"]
    assert len(rows) == 6 and all(r["milliseconds"] > 0 for r in rows)
    _, head, lines = tables.timed("")(rows)
    assert all(len(line) == len(head) for line in lines)


@pytest.mark.exhaustive
def test_under_load_everyone_is_served():
    base = workload()
    small = Workload(base.subject, base.stream, 3.0, base.gains)
    rows = studies.load(small, 0, names=("off", "macro"), sequences=5, width=2, most=10)
    assert [r["preset"] for r in rows] == ["off", "macro"]
    assert all(0 < r["completion"] <= r["completion_p95"] and r["tokens_per_second"] > 0 for r in rows)
    _, head, lines = tables.load(rows)
    assert all(len(line) == len(head) for line in lines)


def test_measures_of_text():
    assert ablation.distinct([[1, 2, 3, 4]], 2) == 1 and ablation.distinct([[1, 1, 1, 1]], 2) == 1 / 3
    assert ablation.repetition([list(range(50))]) == 0
    assert ablation.repetition([[1, 2] * 20], n=4) == pytest.approx(35 / 37)
    assert ablation.repetition([[1, 2, 3, *range(9, 60), 1, 2, 3]], n=3, window=20) == 0
    assert ablation.divergence([[1, 2, 3]], [[1, 2, 3]]) == 0
    assert ablation.divergence([[1, 2]], [[3, 4]]) == pytest.approx(np.log(2))


def test_the_text_must_be_longer_than_a_window():
    with pytest.raises(ValueError, match="text must have more than 2000 tokens; got 2000"):
        workload().windows(1, 2000, 0)
