"""Samplers in the engine: selected per sequence, the same in a crowd, with no leaks."""

import dataclasses

import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.calibration import load_calibration
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from entropic_jax.serving.offline.search_engine import make_engine as offline_engine
from entropic_jax.serving.options.control_options import Control
from entropic_jax.serving.options.model import EMBEDDED
from entropic_jax.serving.request import Request, RequestError
from tests.marks import exhaustive
from tests.serving.test_engine import EXACT, WARM, collect, engine_request, nothing_is_left, prompt, run


@pytest.fixture(scope="module")
def model(directory) -> models.Model:
    """A model with random weights, sharp enough for entropies to vary."""
    loaded = models.load(directory, "float32")
    params = {**loaded.params, "lm_head": {"kernel": 3 * loaded.params["lm_head"]["kernel"]}}
    return dataclasses.replace(loaded, params=params)


@pytest.fixture(scope="module")
def calibration():
    """A calibration with which the untrained model visits every quadrant."""
    entropy = (1.0, 1.5, 2.5, 3.0, 3.5, 4.0, 4.5)
    varentropy = (0.2, 0.5, 1.0, 2.0, 2.5, 3.0, 4.0)
    return load_calibration(EMBEDDED)._replace(quantiles=entropy, varentropy_quantiles=varentropy)


def engine_of(model, calibration, name: str, **options):
    fields = {**EXACT, "preset": name, "branches": 1, **options}
    engine = LLMEngine(model, EngineOptions(**fields), calibration)
    yield engine
    engine.close()
    nothing_is_left(engine)


def sampled(control: Control, seed: int = 1):
    lengths = (5, 31, 1, 17, 40)
    return [
        engine_request(f"s{seed}-{i}", prompt(n, seed + i), control, seed=i, **WARM)
        for i, n in enumerate(lengths)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["entropix", *exhaustive("dslider", "entropix-as-released")])
def test_alone_in_a_crowd_and_as_offline(model, calibration, name):
    control = Control(name)
    for engine in engine_of(model, calibration, name, block_size=64):  # as offline: agreement is over pages
        single = engine_request("mine", prompt(37, 99), control, seed=5, max_tokens=24, **WARM)
        plain = dataclasses.replace(single, control=Control())
        ((alone, last),) = run(engine, single)
        ((other, _),) = run(engine, plain)
        assert last.finish_reason == "length" and alone != other
        left = engine.submit(engine_request("leaves", prompt(9, 3), control, max_tokens=60, **WARM))
        next(iter(left))
        left.cancel()
        mixed = run(engine, *sampled(control), single, plain, *sampled(Control("micro"), 20))
        assert (mixed[5][0], mixed[6][0]) == (alone, other)
        greedy = dataclasses.replace(single.request, temperature=0.0)
        answers = [
            run(engine, dataclasses.replace(single, request=greedy, control=c))[0][0]
            for c in (control, Control())
        ]
        assert answers[0] == answers[1]
    reference = offline_engine(
        Control(name, (("branches", 1),) if name == "entropix" else ()), calibration, model
    )
    request = Request(prompt=single.request.prompt, seed=5, max_tokens=24, ignore_eos=True, **WARM)
    assert list(next(reference.batch([request])).token_ids) == alone


@pytest.mark.exhaustive
def test_preemption_keeps_what_a_law_remembers(model, calibration):
    control = Control("dslider")
    engine_requests = [
        engine_request(f"j{i}", prompt(30, i), control, seed=i, max_tokens=40, **WARM) for i in range(6)
    ]
    results = []
    for pages in (200, 40):
        for engine in engine_of(model, calibration, "dslider", num_pages=pages):
            results.append([tokens for tokens, _ in run(engine, *engine_requests)])
            assert (engine.snapshot()["preemptions"] > 0) == (pages == 40)
    assert results[0] == results[1]


@pytest.mark.exhaustive
def test_steps_without_it_do_not_pay_for_it(model, calibration):
    options = dict(batch_invariant=False, max_num_seqs=2)
    for engine in engine_of(model, calibration, "entropix", **options):
        run(
            engine,
            engine_request("plain", prompt(9)),
            engine_request("drawn", prompt(9, 1), Control("entropix"), **WARM),
        )
        kinds = {key[3]: program for key, program in engine.programs._compiled.items() if key[0] == "decode"}
        cost = {samples: program.cost_analysis()["flops"] for samples, program in kinds.items()}
        assert cost[False] < cost[True]


@pytest.mark.slow
def test_a_clarification_is_said_unless_it_is_forbidden(model, calibration):
    always = calibration._replace(quantiles=(0.0,) * 7, varentropy_quantiles=(90.0,) * 7)
    for engine in engine_of(model, always, "entropix", clarification="hm"):
        words = engine.tokenizer.encode("hm", special=False)
        single = engine_request("mine", prompt(7), Control("entropix"), **WARM)
        assert run(engine, single)[0][0][: len(words)] == words
        never = dataclasses.replace(single.request, logit_bias={words[0]: -np.inf})
        assert words[0] not in run(engine, dataclasses.replace(single, request=never))[0][0]


@pytest.mark.slow
def test_what_a_server_refuses(model, calibration):
    for engine in engine_of(model, calibration, "entropix"):
        with pytest.raises(
            RequestError,
            match="preset must be one of off, micro, macro, full, meso-lossy, full-lossy, entropix",
        ):
            engine.submit(engine_request("x", (1,), Control("dslider")))
        with pytest.raises(RequestError, match="branches must be between 1 and 1; got 3"):
            engine.submit(engine_request("x", (1,), Control("entropix", (("branches", 3),))))
        output_stream = engine.submit(engine_request("x", (1,), Control("micro", (("clarification", "hm"),))))
        assert collect(output_stream)[1].finish_reason == "length"
    with pytest.raises(RequestError, match=r"without calibration\.json"):
        LLMEngine(model, EngineOptions(**{**EXACT, "preset": "entropix"}))
