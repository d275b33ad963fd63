"""Information gained about a reference text: a damaged model explains less, whatever τ says."""

import inspect
import shutil

import jax
import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.analysis import ablation, studies, tables
from entropic_jax.analysis.ablation import Subject
from entropic_jax.analysis.information import information_gained, order_zero_surprisal
from entropic_jax.attention.page_selection import Selection
from entropic_jax.control import chain
from entropic_jax.control.pruning import FixedPruning
from entropic_jax.pallas.paged_attention import SelectionRules
from entropic_jax.serving.options.model import EMBEDDED
from entropic_jax.state import Hardware
from entropic_jax.state.ledger import prefill_seconds, step_cost

from .test_studies import workload

TIGHT_PAGES = Selection(
    dense_layers=0,
    first_layer_scale=1.0,
    page_size=16,
    rules=SelectionRules(sink_pages=1, recent_pages=2, min_pages=0, bound_weight=0.0),
)


@pytest.mark.exhaustive
@pytest.mark.standard_promotion
def test_a_pruned_cache_lowers_the_information_and_hardly_entropic_time():
    model = models.load(EMBEDDED, "float32")
    tokens = model.tokenizer.encode(inspect.getsource(shutil))[:1216]
    prompt, tail = tokens[:1024], tokens[1024:]
    reference = order_zero_surprisal(prompt, tail, model.decoder.shape.vocabulary)
    subject = Subject(model.decoder, model.params)
    state = ablation.prefill(subject, [prompt], len(tail) + 1)
    rates = []
    for law, pages in ((chain(), None), (chain(FixedPruning(0.999)), TIGHT_PAGES)):
        scored = ablation.forced(subject, law, ablation.resume(state, law, pages), [tail])
        rates.append(information_gained(scored.surprisal[0], reference, float(scored.entropic_time[0]), 1.0))
    dense, pruned = rates
    assert scored.kept.mean() < 0.1
    assert pruned.bits < 0.85 * dense.bits
    assert pruned.entropic_efficiency == pytest.approx(dense.entropic_efficiency, rel=0.1)  # τ is blind


def test_the_text_itself_is_worth_nothing_to_the_code_it_is_compared_with():
    reference = order_zero_surprisal([0, 1, 1], [1, 0, 2], 3)
    counts = [(2.5, 4.5), (1.5, 5.5), (0.5, 6.5)]
    np.testing.assert_allclose(reference, [-np.log(count / total) for count, total in counts])
    assert information_gained(reference, reference, 9.0, 1.0).bits == 0
    assert information_gained(reference + 1, reference, 9.0, 1.0).bits < 0


def test_every_perturbation_of_a_calibrated_forecast_costs_information_on_average():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(5))
    text = rng.choice(5, 20000, p=p)
    reference = order_zero_surprisal([], text, 5)
    bits = lambda q: information_gained(-np.log(q)[text], reference, 1.0, 1.0).bits
    for _ in range(20):
        other = p * np.exp(rng.normal(0, 0.5, 5))
        assert bits(other / other.sum()) < bits(p)


@pytest.mark.parametrize(
    ("surprisal", "seconds", "message"),
    [(np.zeros(3), 1.0, "must have one shape"), (np.zeros(2), 0.0, "seconds must be above 0; got 0.0")],
)
def test_shapes_and_costs_are_checked(surprisal, seconds, message):
    with pytest.raises(ValueError, match=message):
        information_gained(surprisal, np.zeros(2), 1.0, seconds)


def test_a_prompt_costs_what_its_steps_cost_when_products_decide():
    decoder = workload().subject.decoder
    shape, slow = decoder.shape, Hardware(peak=1.0, bandwidth=1e30)
    sizes = {"bytes_per_weight": 4, "bytes_per_cache": 4, "hardware": slow}
    steps = [
        step_cost(
            shape,
            active=np.ones(1, bool),
            positions_read=np.float32(shape.layers * shape.kv_heads * n),
            length=np.full(1, n),
            **sizes,
        ).seconds[0]
        for n in range(1, 21)
    ]
    assert prefill_seconds(shape, 20, **sizes) == pytest.approx(
        float(np.sum(jax.device_get(steps))), rel=1e-5
    )
    assert prefill_seconds(shape, 0, **sizes) == 0


@pytest.mark.exhaustive
def test_the_study_counts_the_prompt_and_one_sequence_a_step():
    rows = studies.information(workload(), 420, 0, sequences=2, scored=24)
    assert len(rows) == 4 and {r["window"] for r in rows} == {0, 1}
    for row in rows:
        total = row["prefill_seconds"] + row["decode_seconds"]
        assert row["bits_per_second"] == pytest.approx(24 * row["bits_per_token"] / total)
        assert row["efficiency"] < row["decode_efficiency"]
        assert row["prefill_seconds"] > 0
    alone = studies.information(workload(), 420, 0, sequences=1, scored=24)
    assert alone[0]["decode_seconds"] == rows[0]["decode_seconds"]  # no other window shares its weights
    _, head, lines = tables.information(rows)
    assert len(lines) == 2 and all(len(line) == len(head) for line in lines)
