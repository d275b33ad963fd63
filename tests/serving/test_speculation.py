"""Speculative decoding in the engine and above it: the tokens are those of plain decoding."""

import json

import numpy as np
import pytest

from entropic_jax import LLM, SamplingParams
from entropic_jax.parameter_tables.speculation_names import read_config
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving.engine import programs
from entropic_jax.serving.engine.draft_choice import DraftChoice
from entropic_jax.serving.engine.engine import EngineOptions
from entropic_jax.serving.engine.interface import Delta, EngineRequest
from entropic_jax.serving.http.metrics import Metrics
from entropic_jax.serving.options.control_options import Control
from entropic_jax.speculation import PassCosts, registry
from tests.marks import exhaustive
from tests.serving.test_engine import (  # noqa: F401  (fixture)
    collect,
    copies_no_pool,
    engine_of,
    engine_request,
    model,
    prompt,
    run,
)
from tests.serving.test_planned_constraints import FreeUntil, Planned

PLAIN = dict(batch_invariant=False, scheduling_policy="fcfs", max_steps=8)
DRAFTS = dict(speculate="suffix")
SUFFIX = dict(**PLAIN, **DRAFTS, num_speculative_tokens=3)
GREEDY, WARM, NARROW = dict(temperature=0.0), dict(temperature=0.7), {9: 9.0, 17: 9.0, 33: 8.0}
LOOPED = dict(temperature=0.0, logit_bias={9: 100.0})  # one token over and over


@pytest.fixture(scope="module")
def off(model):  # noqa: F811
    yield from engine_of(model, **PLAIN)


@pytest.fixture(scope="module")
def suffix(model):  # noqa: F811
    yield from engine_of(model, **SUFFIX)


def repetitive(length: int, seed: int = 0) -> tuple[int, ...]:
    return (prompt(7, seed) * length)[:length]


def requests(max_tokens: int = 30) -> list[EngineRequest]:
    """Requests that differ in everything that the engine does between a pass and a token."""
    settings = (
        GREEDY,
        WARM,
        dict(**WARM, logit_bias=NARROW),
        dict(**WARM, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias=NARROW),
        dict(**GREEDY, presence_penalty=0.5, logprobs=3),
        dict(**GREEDY, dry_multiplier=0.5, dry_allowed_length=1),
        dict(**WARM, top_p=0.8, min_p=0.02, logit_bias=NARROW, logprobs=0),
        dict(**GREEDY, stop=("zz", "\n")),
        dict(**WARM, logit_bias=NARROW, stop_token_ids=(33,), min_tokens=9),
        dict(**GREEDY, min_tokens=5, stop_token_ids=tuple(range(100, 110))),
        dict(**WARM, grammar=Planned(8, 9), logit_bias={8: 9.0, 9: 9.0}),
        dict(**WARM, grammar=FreeUntil(2, 5)),
        dict(**WARM, control=Control("micro"), logit_bias=NARROW),
        dict(**GREEDY, max_tokens=1),
    )
    return [
        engine_request(f"r{i}", repetitive(11 + 6 * i, i), seed=i, **{"max_tokens": max_tokens, **setting})
        for i, setting in enumerate(settings)
    ]


def results(engine, engine_requests: list[EngineRequest]) -> list[tuple]:
    """What a client gets to see of each, apart from measurements."""
    seen = []
    for stream in [engine.submit(r) for r in engine_requests]:
        deltas = list(stream)
        tokens, last = [t for d in deltas for t in d.tokens], deltas[-1]
        seen.append(
            (
                [t.id for t in tokens],
                "".join(t.text for t in tokens),
                [None if t.logprob is None else round(t.logprob, 3) for t in tokens],
                [[a.id for a in t.top] for t in tokens],
                last.finish_reason,
                last.stop_reason,
                last.usage,
            )
        )
    return seen


@pytest.fixture(scope="module")
def expected(off):
    return results(off, requests())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlapped", "always"),
    [(False, True), (True, False), *exhaustive((True, True))],
)
def test_a_crowd_gets_the_tokens_of_plain_decoding(suffix, expected, overlapped, always, monkeypatch):
    if always:  # else launches with and without drafts alternate, by how fast each kind is on this machine
        monkeypatch.setattr(DraftChoice, "drafts", lambda *_, **__: True)
    before = suffix.snapshot()
    suffix.scheduler.overlapped = overlapped
    assert results(suffix, requests()) == expected
    after = suffix.snapshot()
    drafts, drafted, accepted = (
        after[name] - before[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    )
    assert 0 < drafts <= drafted <= 3 * drafts
    assert drafted >= accepted > (40 if always else 0)


@pytest.mark.exhaustive
def test_more_rows_than_a_batch_that_drafts(model, off, monkeypatch):  # noqa: F811
    """Batches that are too large for drafts do not keep smaller ones of the same engine from drafting."""
    monkeypatch.setattr(registry, "CPU_PASS", 64)
    for engine in engine_of(model, **{**SUFFIX, "max_num_seqs": 40}):
        assert max(engine.sizes.shapes.drafting_widths) < 40
        assert results(engine, requests()[:4]) == results(off, requests()[:4])
        assert engine.snapshot()["num_drafts"] > 0


@pytest.mark.exhaustive
def test_drafts_from_a_pruned_cache_change_nothing(model, off, monkeypatch):  # noqa: F811
    cheap = PassCosts((1, 256), (1.0, 1.2), (1, 16), (0.0, 0.0), draft_step=(0.01, 0.0))
    monkeypatch.setattr(programs, "known_costs", lambda _: cheap)
    chosen = requests(12)[1:5]
    expected = results(off, chosen)
    for engine in engine_of(model, **{**SUFFIX, "speculate": "auto"}):
        assert results(engine, chosen) == expected
        assert engine.snapshot()["num_accepted_tokens"] > 10


@pytest.mark.slow
def test_passes_are_counted_per_request_and_per_token(off, suffix):
    request = engine_request("looped", repetitive(30), max_tokens=40, **LOOPED)
    ((plain, last),) = run(off, request)
    assert (last.summary["passes"], last.summary["num_drafted"], last.summary["num_accepted"]) == (40, 0, 0)
    before = suffix.snapshot()
    deltas = list(suffix.submit(request))
    tokens, last = [t for d in deltas for t in d.tokens], deltas[-1]
    assert [t.id for t in tokens] == plain
    accepted = sum(t.metrics["from_draft"] for t in tokens)
    assert last.summary["num_accepted"] == accepted > 10
    assert last.summary["passes"] == 40 - accepted
    assert last.summary["num_drafted"] == sum(t.metrics["num_drafted"] for t in tokens) >= accepted
    assert suffix.snapshot()["num_accepted_tokens"] - before["num_accepted_tokens"] == accepted


@pytest.mark.slow
@pytest.mark.parametrize("pages", [40, pytest.param(52, marks=pytest.mark.exhaustive)])
def test_preemption_changes_nothing_and_drafts_preempt_nobody(model, expected, monkeypatch, pages):  # noqa: F811
    for engine in engine_of(model, **SUFFIX, num_pages=pages):
        batch, scheduler, tried = engine.scheduler.batch, engine.scheduler, []
        reserve, preempt = batch.reserve, scheduler._preempt
        monkeypatch.setattr(batch, "reserve", lambda rows, n: (tried.append(n), reserve(rows, n))[1])
        monkeypatch.setattr(scheduler, "_preempt", lambda: (tried.append(0), preempt())[1])
        assert results(engine, requests()) == expected
        assert engine.snapshot()["preemptions"] > 0
        assert engine.snapshot()["num_accepted_tokens"] > 0
        # Before a sequence is preempted, one plain step did not fit either.
        assert all(tried[i - 1] == 1 for i, n in enumerate(tried) if n == 0)


@pytest.mark.slow
def test_a_row_gives_back_the_pages_of_drafts_that_failed(suffix):
    for _ in range(2):
        run(suffix, *requests(20))
    manager = suffix.scheduler.block_manager
    assert manager.usage == 0
    assert int(manager.reserved.sum()) == 0


@pytest.mark.slow
def test_prefixes_are_shared(off, suffix):
    ids = repetitive(60, 5)
    first = engine_request("first", ids, max_tokens=20, **GREEDY)
    run(off, first), run(suffix, first)
    longer = engine_request("longer", ids[:50] + prompt(9, 8), seed=3, max_tokens=20, **WARM)
    (plain, before), (tokens, last) = run(off, longer)[0], run(suffix, longer)[0]
    assert last.cached_tokens == before.cached_tokens == 48
    assert tokens == plain


@pytest.mark.slow
def test_generated_pages_are_shared_where_no_request_prunes(model, off):  # noqa: F811
    ids = repetitive(30, 3)
    first = engine_request("first", ids, max_tokens=30, **LOOPED)
    for engine in engine_of(model, **SUFFIX, pruning=False):
        ((tokens, last),) = run(engine, first)
        assert last.summary["num_accepted"] > 5
        follow = engine_request("second", (*ids, *tokens, *prompt(3, 4)), seed=1, max_tokens=9, **WARM)
        ((after, last),) = run(engine, follow)
        assert last.cached_tokens == 56  # 59 positions were in the cache, all of verified tokens
        assert after == run(off, follow)[0][0]


@pytest.mark.exhaustive
def test_rows_that_prune_pages_decode_plainly(off, suffix):
    pruned = [
        engine_request(f"p{i}", repetitive(80, i), Control("full-lossy"), seed=i, max_tokens=30, **WARM)
        for i in range(3)
    ]
    before = suffix.snapshot()["num_drafts"]
    assert [t for t, _ in run(suffix, *pruned)] == [t for t, _ in run(off, *pruned)]
    assert suffix.snapshot()["num_drafts"] == before


@pytest.mark.slow
def test_drafts_that_a_grammar_accepts_change_nothing(off, suffix):
    held = lambda: [engine_request("held", repetitive(12), seed=1, grammar=Planned(8, 9), **WARM)]
    assert results(suffix, held()) == results(off, held())


@pytest.mark.slow
def test_failed_logits_end_one_row(model, suffix):  # noqa: F811
    """A row whose pass computes NaN ends; its neighbours, which draft, do not."""
    import dataclasses

    good = engine_request("good", repetitive(20), max_tokens=20, logit_bias={250: -np.inf}, **GREEDY)
    ((alone, _),) = run(suffix, good)
    embedding = model.params["embed_tokens"]["weight"].at[250].set(np.nan)
    broken = dataclasses.replace(model, params={**model.params, "embed_tokens": {"weight": embedding}})
    for engine in engine_of(broken, **SUFFIX):
        (tokens, _), (none, last) = run(engine, good, engine_request("bad", (5, 250, 7, 9)))
        assert tokens == alone
        assert (none, last.finish_reason) == ([], "error") and "not numbers" in last.error


@pytest.mark.slow
def test_no_program_copies_the_pool(suffix):
    run(suffix, engine_request("one", repetitive(20), **LOOPED))
    copies_no_pool(suffix, "decode")


def test_metrics_have_the_names_of_vllm(suffix):
    run(suffix, engine_request("one", repetitive(20), **LOOPED))
    lines = Metrics(suffix, "tiny").text().decode().splitlines()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}
    snapshot = suffix.snapshot()
    for key in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert values[f"vllm:spec_decode_{key}_total"] == snapshot[key] > 0


@pytest.mark.exhaustive
def test_llm_with_several_continuations(directory):
    params = [
        SamplingParams(temperature=0.7, seed=3, n=3, max_tokens=24, ignore_eos=True, logit_bias=NARROW),
        SamplingParams(max_tokens=24, ignore_eos=True, **LOOPED),
    ]
    prompts = ["def add(a, b):\n    return a + b\n" * 2, "ab" * 20]
    texts = {}
    for config in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        options = {"preset": "off"} if config is None else {"speculative_config": config}
        with LLM(directory, max_num_seqs=4, block_size=4, **options) as llm:
            outputs = [o for r in llm.generate(prompts, params, use_tqdm=False) for o in r.outputs]
        texts[config is None] = [o.token_ids for o in outputs]
        accepted = [sum(o.trace["from_draft"]) for o in outputs]
        assert [o.summary["passes"] for o in outputs] == [24 - n for n in accepted]
        assert (sum(accepted) > 10) == (config is not None)
    assert texts[True] == texts[False]


@pytest.mark.exhaustive
def test_generate_command(directory, entropic):
    line = ["generate", "--model", directory, "--prompt", "ab" * 20, "--json", "--max-tokens", "30"]
    line += ["--temperature", "0", "--ignore-eos", "--repetition-penalty", "0.5"]  # which makes it repeat
    trees = []
    for speculate in ("off", "suffix"):
        status, out, errors = entropic(*line, "--speculate", speculate)
        assert status == 0, errors
        trees.append(json.loads(out))
    plain, suffix = trees
    assert suffix["token_ids"] == plain["token_ids"]
    assert (plain["passes"], plain["num_drafted"], plain["num_accepted"]) == (30, 0, 0)
    assert suffix["num_drafted"] >= suffix["num_accepted"] == sum(suffix["trace"]["from_draft"]) > 5
    assert suffix["passes"] == 30 - suffix["num_accepted"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(speculate="magic"),
            "one of off, auto, suffix, pruned, head, or the directory of a draft model or head; got 'magic'",
        ),
        (dict(preset="entropix", **DRAFTS), "speculate must be off together with the preset entropix"),
        (dict(preset="dslider", **DRAFTS), "speculate must be off together with the preset dslider"),
        (dict(preset="paper", **DRAFTS), "speculate must be off together with the preset paper"),
        (dict(method="snapkv", **DRAFTS), "speculate must be off together with the method snapkv"),
        (dict(batch_invariant=True, **DRAFTS), "speculate must be off together with batch_invariant"),
        (dict(num_speculative_tokens=3), "num_speculative_tokens must not be set with speculate off; got 3"),
        (
            dict(speculate="suffix", num_speculative_tokens=16),
            "num_speculative_tokens must be an integer between 1 and 15; got 16",
        ),
    ],
)
def test_engine_options_that_are_refused(options, message):
    with pytest.raises(ParameterError, match=message):
        EngineOptions(**options)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "speculative_config must be a JSON object; got '{'"),
        ([1], "speculative_config must be a mapping"),
        (
            {},
            "must have the method suffix, ngram, pruned, auto or head, or a model; got None",
        ),
        (
            {"method": "eagle"},
            "must have the method suffix, ngram, pruned, auto or head, or a model; got 'eagle'",
        ),
        ({"method": "ngram", "model": "x"}, "must have no model with the method ngram; got 'x'"),
        ({"model": "no/such"}, "must have the directory of a model as model; got 'no/such'"),
        ({"method": "ngram", "k": 1}, "speculative_config must have no keys but .*; got 'k'"),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            "speculative_config: num_speculative_tokens must be an integer between 1 and 15; got 0",
        ),
    ],
)
def test_configurations_that_are_refused(config, message):
    with pytest.raises(ParameterError, match=message):
        read_config(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("generate", "--preset", "meso-lossy"),
            "--speculate must be off together with the preset meso-lossy",
        ),
        (("generate", "--preset", "entropix"), "--speculate must be off together with the preset entropix"),
        (("generate", "--method", "h2o"), "--speculate must be off together with the method h2o"),
        (("serve", "--batch-invariant"), "--speculate must be off together with --batch-invariant"),
        (
            ("serve", "--speculative-config", '{"method": "eagle"}'),
            "--speculative-config must have the method suffix, ngram, pruned, auto or head, or a model; got",
        ),
    ],
)
def test_command_lines_that_are_refused(entropic, arguments, message):
    extra = ("--prompt", "x") if arguments[0] == "generate" else ("--port", "0")
    status, _, errors = entropic(*arguments, "--speculate", "suffix", *extra)
    assert status == 2
    assert message in errors


def test_llm_refuses_a_preset_that_prunes(directory):
    with pytest.raises(ParameterError, match="speculate must be off together with the preset full-lossy"):
        LLM(directory, preset="full-lossy", speculate="suffix")


def test_the_last_delta_has_the_summary(suffix):
    tokens, last = collect(suffix.submit(engine_request("one", repetitive(20), **LOOPED)))
    assert isinstance(last, Delta)
    assert last.summary["passes"] + last.summary["num_accepted"] == len(tokens)
