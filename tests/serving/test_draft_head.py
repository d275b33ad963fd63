"""A draft head in the engine and above it: the tokens are those of plain decoding."""

import dataclasses
import json

import pytest

from entropic_jax import LLM, SamplingParams, models
from entropic_jax.models import draft_head, draft_head_files
from entropic_jax.parameter_tables.speculation_names import read_config
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving.engine import program_shapes, programs
from entropic_jax.serving.engine.engine import EngineOptions
from entropic_jax.serving.engine.start import start
from entropic_jax.serving.options.draft_model import ModelWithHead, load, with_head
from entropic_jax.speculation import Cascade, HeadDrafter, PassCosts, make_speculator
from tests.serving.test_engine import copies_no_pool, engine_of, model  # noqa: F401
from tests.serving.test_speculation import PLAIN, expected, off, requests, results  # noqa: F401  (fixtures)

CHEAP = PassCosts((1, 256), (1.0, 1.2), (1, 16), (0.0, 0.0), draft_step=(0.01, 0.0), head_step=(0.01, 0.0))


def head_of(model: models.Model) -> tuple[draft_head.DraftHead, models.Params]:  # noqa: F811
    shape = model.decoder.shape
    config = draft_head.HeadConfig(shape.hidden, shape.vocabulary, shape.layers, shape.layers - 1, 24)
    head = draft_head.DraftHead(model.decoder, config)
    return head, draft_head.initialise(head, model.params, 3)


@pytest.fixture
def head_directory(directory, tmp_path):
    """A copy of the model's directory with a random head in it."""
    model = models.load(directory)  # noqa: F811
    models.save(model, tmp_path)
    draft_head_files.save(tmp_path / draft_head_files.FOLDER, *head_of(model))
    return str(tmp_path)


@pytest.mark.exhaustive
def test_a_crowd_gets_the_tokens_of_plain_decoding(model, expected, monkeypatch):  # noqa: F811
    def make_alone(name, rows, num_tokens, costs, headed):
        speculator = make_speculator(name, rows, num_tokens, costs or CHEAP, headed)
        assert speculator is not None and isinstance(speculator.drafter, Cascade)
        return dataclasses.replace(speculator, drafter=speculator.drafter.drafters[1])

    monkeypatch.setattr(programs, "known_costs", lambda *_: CHEAP)
    monkeypatch.setattr(program_shapes, "make_speculator", make_alone)
    options = dict(**PLAIN, speculate="head", num_speculative_tokens=3, num_pages=40)
    for engine in engine_of(with_head(model, *head_of(model)), **options):
        assert results(engine, requests()) == expected
        assert engine.snapshot()["preemptions"] > 0
        assert engine.snapshot()["num_draft_tokens"] > 100
        copies_no_pool(engine, "decode")


@pytest.mark.exhaustive
def test_llm_server_and_command_find_the_head_of_a_directory(head_directory, entropic):
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=16, ignore_eos=True)
    texts = []
    for speculate in ("off", "head", f"{head_directory}/{draft_head_files.FOLDER}"):
        with LLM(head_directory, max_num_seqs=1, num_pages=8, block_size=16, speculate=speculate) as llm:
            texts.append(llm.generate("import os", params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1] == texts[2]
    command = ["generate", "--model", head_directory, "--prompt", "import os", "--max-tokens", "8", "--json"]
    answers = []
    for speculate in ("off", "head"):
        status, out, errors = entropic(*command, "--seed", "3", "--speculate", speculate)
        assert status == 0, errors
        answers.append(json.loads(out)["token_ids"])
    assert answers[0] == answers[1]
    options = EngineOptions(max_num_seqs=1, block_size=16, num_pages=8, warmup="none", speculate="head")
    running = start(head_directory, options)
    try:
        info = running.describe()
        assert info["draft_model"] is None and info["batch"]["speculate"] == "head"
    finally:
        running.close()


@pytest.mark.exhaustive
def test_drafts_change_no_token_of_a_model_of_bfloat16(head_directory):
    """Activations are float32 on a CPU, those of the head, too."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
    tokens = []
    for speculate in ("off", "suffix", "head"):
        options = dict(max_num_seqs=1, num_pages=8, block_size=16, speculate=speculate)
        with LLM(head_directory, dtype="bfloat16", **options) as llm:
            tokens.append(llm.generate("import os import os", params)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_directory_without_a_head_is_refused(directory):
    model = models.load(directory)  # noqa: F811
    with pytest.raises(models.ModelError, match=f"{directory}/draft_head holds no draft head"):
        load(model, "head", "float32", path=directory)


def test_the_head_of_a_directory_is_loaded(head_directory):
    model = models.load(head_directory)  # noqa: F811
    with_its_head = load(model, "head", "float32", path=head_directory)
    assert isinstance(with_its_head, ModelWithHead) and with_its_head.head == head_of(model)[0]
    assert load(model, "suffix", "float32", path=head_directory) is model


def test_auto_takes_the_head_of_a_directory(head_directory, directory):
    model = models.load(head_directory)  # noqa: F811
    assert isinstance(load(model, "auto", "float32", path=head_directory), ModelWithHead)
    assert load(model, "auto", "float32", path=directory) is model  # there is none
    assert load(model, "auto", "float32", path=head_directory, joins=False) is model
    names = [
        [type(part).__name__ for part in make_speculator("auto", 1, headed=headed).drafter.drafters]
        for headed in (False, True)
    ]
    assert names == [["SuffixDrafter", "PrunedDrafter"], ["SuffixDrafter", "HeadDrafter", "PrunedDrafter"]]


@pytest.mark.slow
def test_the_default_preset_drafts_with_the_head_of_a_directory(head_directory):
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=16, ignore_eos=True)
    texts = []
    for preset in ("off", "meso"):
        with LLM(head_directory, max_num_seqs=1, num_pages=8, block_size=16, preset=preset) as llm:
            texts.append(llm.generate("import os", params)[0].outputs[0].token_ids)
            assert isinstance(llm._engine.model, ModelWithHead) == (preset == "meso")
    assert texts[0] == texts[1]


def test_the_model_that_ships_has_a_head():
    with_its_head = load(models.load(), "auto", "float32")
    assert isinstance(with_its_head, ModelWithHead) and with_its_head.head is not None
    assert with_its_head.head.config.mean_acceptance > 0.5
    folder = models.directory_of(None) / draft_head_files.FOLDER
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 2_000_000


def test_the_drafter_of_a_head_is_asked_after_the_suffix_drafter():
    speculator = make_speculator("head", 2)
    assert speculator is not None and isinstance(speculator.drafter, Cascade)
    assert isinstance(speculator.drafter.drafters[1], HeadDrafter)
    assert read_config({"method": "head", "num_speculative_tokens": 3}) == ("head", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(tensor_parallel_size=2),
            "must not name a draft model or head where the model is divided",
        ),
        (dict(preset="paper"), "speculate must be off together with the preset paper; got 'head'"),
        (dict(enable_lora=True), "must not name a draft model or head together with enable_lora"),
    ],
)
def test_what_a_head_cannot_be_combined_with_is_refused(options, message):
    with pytest.raises(ParameterError, match=message):
        EngineOptions(speculate="head", **options)


def test_pages_may_be_left_unread_beside_a_head():
    assert not EngineOptions(speculate="head").prunes
    assert EngineOptions(speculate="head", pruning=True, preset="off").prunes
