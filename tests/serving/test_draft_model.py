"""A draft model in the engine and above it: the tokens are those of plain decoding."""

import dataclasses
import json

import pytest

from entropic_jax import LLM, SamplingParams, models
from entropic_jax.models import Tokenizer
from entropic_jax.parameter_tables.speculation_names import read_config
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving import memory
from entropic_jax.serving.engine import program_shapes, programs
from entropic_jax.serving.engine.engine import EngineOptions
from entropic_jax.serving.engine.start import start
from entropic_jax.serving.options.draft_model import with_draft
from entropic_jax.speculation import Cascade, PassCosts, make_speculator
from tests.serving.test_engine import copies_no_pool, engine_of, engine_request, model, prompt, run  # noqa: F401
from tests.serving.test_speculation import (  # noqa: F401  (fixtures)
    GREEDY,
    LOOPED,
    PLAIN,
    WARM,
    expected,
    off,
    repetitive,
    requests,
    results,
)

CHEAP = PassCosts((1, 256), (1.0, 1.2), (1, 16), (0.0, 0.0), draft_step=(0.01, 0.0))
SMALL = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)


def small(model, **changes) -> models.Model:  # noqa: F811
    config = dataclasses.replace(model.config, **SMALL, **changes)
    return dataclasses.replace(models.initialise(config, 3), tokenizer=model.tokenizer)


@pytest.fixture
def drafting(directory, monkeypatch) -> dict:
    """Options of an engine that drafts with a model alone, at no cost."""

    def make_alone(name, rows, num_tokens, costs, headed):
        speculator = make_speculator(name, rows, num_tokens, costs or CHEAP, headed)
        assert speculator is not None and isinstance(speculator.drafter, Cascade)
        return dataclasses.replace(speculator, drafter=speculator.drafter.drafters[1])

    monkeypatch.setattr(programs, "known_costs", lambda *_: CHEAP)
    monkeypatch.setattr(program_shapes, "make_speculator", make_alone)
    return dict(**PLAIN, speculate=directory, num_speculative_tokens=3)


@pytest.mark.exhaustive  # as with a draft head, whose crowd runs in CI
def test_a_crowd_gets_the_tokens_of_plain_decoding(model, expected, directory, monkeypatch):  # noqa: F811
    monkeypatch.setattr(programs, "known_costs", lambda *_: CHEAP)
    options = dict(**PLAIN, speculate=directory, num_speculative_tokens=3, num_pages=40)
    for engine in engine_of(with_draft(model, small(model)), **options):
        assert results(engine, requests()) == expected
        assert engine.snapshot()["preemptions"] > 0
        assert engine.snapshot()["num_draft_tokens"] > 100
        copies_no_pool(engine, "decode")


@pytest.mark.exhaustive
def test_a_perfect_draft_is_never_refused(model, off, drafting):  # noqa: F811
    """So each page of a row has keys and values of both models: shared, preempted or decoded plainly."""
    rows = [
        engine_request(f"r{i}", repetitive(20 + 5 * i, i), seed=i, max_tokens=30, **how)
        for i, how in enumerate((GREEDY, WARM) * 3)
    ]
    ids = repetitive(60, 5)
    first = engine_request("first", ids, max_tokens=20, **GREEDY)
    longer = engine_request("longer", ids[:50] + prompt(9, 8), seed=3, max_tokens=20, **WARM)
    plain = [tokens for tokens, _ in (*run(off, *rows), *run(off, first), *run(off, longer))]
    follow = engine_request("follow", (*ids, *plain[-2], *prompt(3, 4)), seed=1, max_tokens=20, **WARM)
    plain.append(run(off, follow)[0][0])
    for engine in engine_of(with_draft(model, model), **drafting, num_pages=40):
        crowd = run(engine, *rows)
        assert engine.snapshot()["preemptions"] > 0
        hits = [*run(engine, first), *run(engine, longer), *run(engine, follow)]
        assert [last.cached_tokens for _, last in hits[1:]] == [48, 76]  # 76: generated pages, too
        assert [tokens for tokens, _ in (*crowd, *hits)] == plain
        snapshot = engine.snapshot()
        assert snapshot["num_draft_tokens"] == snapshot["num_accepted_tokens"] > 100


@pytest.mark.slow
def test_an_engine_describes_both_models(directory):
    options = EngineOptions(max_num_seqs=1, block_size=16, num_pages=8, warmup="none", speculate=directory)
    running = start(directory, options)
    try:
        info = running.describe()
        json.dumps(info)
        assert info["model"] == info["draft_model"] and info["options"]["speculate"] == directory
    finally:
        running.close()


def test_the_pages_of_both_models_are_counted(model):  # noqa: F811
    both, shape = with_draft(model, small(model)), model.decoder.shape
    alone = memory.page_bytes(shape, 4, 4)
    assert memory.page_bytes(both.decoder.shape, 4, 4) == alone + 2 * 1 * 1 * 8 * 4 * 4
    assert both.decoder.shape.vocabulary == shape.vocabulary


@pytest.mark.exhaustive
def test_llm_and_generate_command(directory, entropic):
    """A directory drafts for itself, by each of the interfaces."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=16, ignore_eos=True)
    texts = []
    for options in ({}, dict(speculative_config={"model": directory, "num_speculative_tokens": 2})):
        with LLM(directory, max_num_seqs=1, block_size=4, **options) as llm:
            (output,) = llm.generate(["def add(a, b):"], params, use_tqdm=False)
        texts.append(output.outputs[0].token_ids)
    assert texts[0] == texts[1]
    line = ["generate", "--model", directory, "--prompt", "def add", "--json", "--max-tokens", "12"]
    trees = []
    for speculate in ("off", directory):
        status, out, errors = entropic(*line, "--temperature", "0", "--ignore-eos", "--speculate", speculate)
        assert status == 0, errors
        trees.append(json.loads(out))
    assert trees[0]["token_ids"] == trees[1]["token_ids"]
    assert trees[1]["num_drafted"] >= trees[1]["num_accepted"]


def test_configurations_name_a_directory(directory):
    for method in ({}, {"method": "draft_model"}):
        assert read_config({"model": directory, "num_speculative_tokens": 4, **method}) == (directory, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tensor_parallel_size=2), "must not name a draft model or head where the model is divided"),
        (dict(pruning=True), "pruning must be false with a draft model"),
        (dict(preset="full-lossy"), "speculate must be off together with the preset full-lossy"),
        (dict(batch_invariant=True), "speculate must be off together with batch_invariant"),
    ],
)
def test_what_cannot_be_combined_is_refused(directory, options, message):
    with pytest.raises(ParameterError, match=message):
        EngineOptions(speculate=directory, **options)
    assert not EngineOptions(speculate=directory).prunes


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("serve", "--port", "0")])
def test_command_lines_that_are_refused(directory, entropic, command):
    status, _, errors = entropic(*command, "--tensor-parallel-size", "2", "--speculate", directory)
    assert status == 2
    assert "--speculate must not name a draft model or head where the model is divided over" in errors


def test_other_tokens_are_refused(model):  # noqa: F811
    draft = small(model)
    with pytest.raises(ParameterError, match="must be a directory with tokenizer"):
        with_draft(model, dataclasses.replace(draft, tokenizer=None))
    described = json.loads(model.tokenizer.backend.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other = Tokenizer(type(model.tokenizer.backend).from_str(json.dumps(described)))
    with pytest.raises(ParameterError, match="same tokenizer; got one in which 'a' is token"):
        with_draft(model, dataclasses.replace(draft, tokenizer=other))
    assert with_draft(model, small(model, vocab_size=300)).decoder.shape.vocabulary == 258
