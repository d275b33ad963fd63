"""The benchmark of expert policies: gains, regressions and controls, on a small random mixture."""

import argparse
from functools import cache as once
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks.ablation.experts import gains, measure, report
from benchmarks.harness.held_out_text import module_files
from entropic_jax import models
from entropic_jax.methods.expert_selection import ExpectedReductionExperts, FixedExperts
from entropic_jax.models.train import corpus, data, export
from entropic_jax.models.train.shape import Shape
from tests.train.model import SPARSE, TINY, random_params


@once
def model() -> models.Model:
    config = models.Config(
        architecture="MixtralForCausalLM",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=5,
        num_experts_per_tok=3,
    )
    return models.Model(config, jax.tree.map(lambda x: 3 * x, models.initialise(config, 0).params))


@once
def texts() -> measure.Texts:
    tokens = np.random.default_rng(0).integers(1, 96, (3, 17)).astype(np.int32)
    return measure.Texts(["a", "b", "c"], tokens, np.full(3, 40))


@once
def measured() -> gains.Gains:
    return gains.measure(model(), texts().tokens)


@pytest.mark.slow
def test_gains_add_up_to_what_all_further_experts_bring():
    every = gains.passes(model(), texts().tokens, -1, 3)
    first = gains.passes(model(), texts().tokens, 1, 1)
    total = (first.loss - every.loss)[:, 1:].reshape(-1)
    np.testing.assert_allclose(measured().loss[1].sum(0), total, atol=1e-5)
    assert measured().features.shape == (2, 2, 45, 6)
    np.testing.assert_allclose(measured().features[0, 0, :15, 3], every.entropy[0, :-1], rtol=1e-5)


@pytest.mark.slow
def test_a_replay_reads_what_a_parallel_pass_reads():
    every = gains.passes(model(), texts().tokens, -1, 3)
    replayed = measure.run_policy(model(), texts(), FixedExperts(3))
    np.testing.assert_allclose(replayed.nats, every.loss.sum(1), rtol=1e-4)
    np.testing.assert_allclose(replayed.entropy.T, every.entropy, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_regression_expects_what_depends_on_its_features():
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((2, 2, 6))
    subject = measured()._replace(features=rng.standard_normal((2, 2, 45, 6)))
    subject = subject._replace(entropy=gains.expected(subject, weights))
    np.testing.assert_allclose(gains.fit(subject), weights, rtol=1e-4, atol=1e-5)
    assert (gains.fit(subject, gains.ROUTER)[..., ~gains.ROUTER] == 0).all()


@pytest.mark.slow
def test_controls_read_as_many_experts_as_the_law():
    weights = gains.fit(measured())
    price = float(np.median(gains.expected(measured(), weights)))
    law, counts, entropy = measure.with_controls(
        model(), texts(), ExpectedReductionExperts(weights, price), seed=0
    ).values()
    assert 1 < law.counts.mean() < 3
    assert counts.counts.sum() == law.counts.sum() and (counts.counts != law.counts).any()
    rows = lambda x: sorted(map(tuple, x.reshape(-1, x.shape[-1]).tolist()))
    assert rows(counts.counts) == rows(law.counts)
    assert (entropy.counts != law.counts).any()


def results() -> dict:
    """Measurements of three files, in which the law saves a tenth beside every other policy."""
    row = lambda setting, nats, experts: {
        "setting": setting,
        "nats": [nats, 2 * nats, 3 * nats],
        "experts": [experts] * 3,
        "flops": [experts] * 3,
    }
    curve = [row("1", 80.0, 1.0), row("2", 60.0, 2.0)]
    controls = {f"{measure.LAW}, {name}": curve for name in (measure.COUNTS, measure.ENTROPY)}
    return {
        "cpu": "AMD EPYC",
        "date": "2026-01-01",
        "commit": "0123abc",
        "model": {"experts": 5, "inner": 24, "most": 2, "layers": 2, "hidden": 32},
        "training": [],
        "tokens": 16,
        "files": ["a", "b", "c"],
        "bytes": [40, 80, 120],
        "mean_gain": {"entropy": [0.1], "loss": [0.2]},
        "correlations": {"q": {"entropy": 0.1, "|entropy|": 0.2, "loss": 0.3}},
        "policies": {"fixed": curve, "top-p": curve, measure.LAW: [row("0.1", 63.0, 1.5)], **controls},
    }


def test_policies_are_compared_at_equal_experts_read():
    by_policy, compared, _ = report.tables(results())
    assert by_policy[2][0][2:5] == ["1.000", "50.0", f"{80 / np.log(2) / 40:.4f}"]
    assert compared[2] == [["1.500", *["-10.00 (-10.00 to -10.00)"] * 4]]
    assert any("5 experts of width 24" in note for note in report.notes(results()))


def test_policies_are_not_compared_beyond_their_settings():
    changed = results()
    changed["policies"]["top-p"] = changed["policies"]["top-p"][:1]
    assert report.tables(changed)[1][2][0][2] == "–"


def exported(shape: Shape, folder: Path) -> Path:
    documents = [corpus.Document("python", f.name, f.read_text("utf-8")) for f in module_files("c*.py")]
    tokenizer = data.train_tokenizer(documents, shape.vocab_size)
    export.export(random_params(shape), shape, tokenizer, folder)
    return folder


@pytest.mark.exhaustive
def test_the_command_measures_an_exported_model(tmp_path: Path):
    options = argparse.Namespace(
        model=exported(SPARSE, tmp_path), held_out=None, files=2, calibration_files=2, tokens=12, prices=1
    )
    measured_results = measure.run(options, Console(quiet=True))
    assert set(measured_results["policies"]) >= {"fixed", "top-p", measure.LAW, measure.ROUTER_ONLY}
    assert len(measured_results["policies"]["fixed"]) == SPARSE.num_experts_per_tok
    assert all(table[2] for table in report.tables(measured_results))


def test_a_model_without_experts_is_refused(tmp_path: Path):
    options = argparse.Namespace(model=exported(TINY, tmp_path))
    with pytest.raises(ValueError, match="--model must be a mixture of experts"):
        measure.run(options, Console(quiet=True))
