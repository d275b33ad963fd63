"""LoRA adapters in the engine: each row has its own, and rows without one are as they were."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models import lora, lora_files
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving.engine import programs
from entropic_jax.serving.engine.engine import EngineOptions
from entropic_jax.serving.engine.prefix_cache import root_hash
from entropic_jax.serving.options.lora import LoRAModule
from entropic_jax.serving.request import RequestError
from entropic_jax.speculation import PassCosts
from tests.lora_adapters import write_adapter
from tests.serving.test_engine import engine_of, engine_request, model, prompt, run  # noqa: F401

PLAIN = dict(batch_invariant=False, scheduling_policy="fcfs", pruning=False)
LORA = dict(**PLAIN, enable_lora=True, max_loras=3, max_lora_rank=8)
WARM = dict(temperature=0.8, top_p=0.9)


@pytest.fixture(scope="module")
def paths(model, tmp_path_factory) -> dict[str, str]:  # noqa: F811
    """Three adapters, of different rank."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(folder / name, model, seed, rank, size=0.5))
        for name, seed, rank in (("a", 1, 4), ("b", 2, 8), ("c", 3, 2))
    }


def merged(model, path: str) -> models.Model:  # noqa: F811
    """The model with an adapter added to its weights."""
    factors, params = lora_files.read_adapter(Path(path), model.config, 8), model.params
    layers = [dict(layer) for layer in params["layers"]]
    for name, target in lora.targets(model.config).items():
        block = lora.BLOCKS[name][0]
        for place, number in enumerate(target.layers):
            kernel = np.asarray(layers[number][block][name]["kernel"])
            update = factors[name].a[place] @ factors[name].b[place]
            changed = {**layers[number][block][name], "kernel": kernel + update}
            layers[number][block] = {**layers[number][block], name: changed}
    return dataclasses.replace(model, params={**params, "layers": tuple(layers)})


def mixed(**fields) -> list:
    """Requests for no adapter and for each of three, some with a prompt in common."""
    adapters = (None, "a", "b", None, "c", "a", "b")
    return [
        engine_request(f"r{i}", prompt(30, i // 2), seed=i, adapter=adapter, **WARM, **fields)
        for i, adapter in enumerate(adapters)
    ]


@pytest.fixture(scope="module")
def expected(model, paths) -> list[list[int]]:  # noqa: F811
    """The tokens of `mixed` by models with the adapters merged into their weights."""
    tokens: dict[str, list[int]] = {}
    for engine in engine_of(model, **PLAIN, enable_prefix_caching=False):
        for name, path in {None: None, **paths}.items():
            # The weights are an argument of the programs, so all models share them.
            engine.programs.params = (model if path is None else merged(model, path)).params
            requests = [
                dataclasses.replace(request, adapter=None) for request in mixed() if request.adapter == name
            ]
            for request, (result, _) in zip(requests, run(engine, *requests), strict=True):
                tokens[request.id] = result
    return [tokens[request.id] for request in mixed()]


@pytest.fixture(scope="module")
def adapted(model, paths):  # noqa: F811
    for engine in engine_of(model, **LORA):
        for name, path in paths.items():
            engine.load_adapter(name, path)
        yield engine


def tokens_of(results) -> list[list[int]]:
    return [tokens for tokens, _ in results]


@pytest.mark.slow
def test_rows_of_one_batch_have_their_own_adapters(adapted, expected):
    assert tokens_of(run(adapted, *mixed())) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert tokens_of(run(adapted, *reversed(mixed()))) == expected[::-1]


@pytest.mark.slow
def test_rows_without_an_adapter_keep_their_bits(model, paths):  # noqa: F811
    """All that is reported of every token, beside rows with an adapter, against an engine without any."""
    exact = dict(pruning=False, scheduling_policy="fcfs", batch_invariant=True)
    scored = mixed(max_tokens=20, logprobs=3, prompt_logprobs=2)[:3]
    requests = [dataclasses.replace(request, adapter=None) for request in scored]
    results = []
    for options, adapter in ((exact, None), ({**LORA, **exact}, "a")):
        for engine in engine_of(model, **options):
            if adapter is not None:
                engine.load_adapter(adapter, paths[adapter])
            beside = engine_request("beside", prompt(9), adapter=adapter, max_tokens=40)
            streams = [engine.submit(request) for request in (beside, *requests)]
            _, *deltas = [list(stream) for stream in streams]
            tokens = [[token for delta in of_one for token in delta.tokens] for of_one in deltas]
            prompts = [[token for delta in of_one for token in delta.prompt] for of_one in deltas]
            assert [len(of_one) for of_one in prompts] == [30] * 3
            # The row's share of the weights that a step reads depends on how many rows it has.
            report = [
                (t.id, t.logprob, t.top, {k: v for k, v in t.metrics.items() if k != "cost"})
                for of_one in tokens
                for t in of_one
            ]
            results.append((report, prompts))
    assert results[0] == results[1] and len(results[0][0]) == 60


def test_programs_are_unchanged_without_the_option(model):  # noqa: F811
    for engine in engine_of(model, **PLAIN):
        state = engine.scheduler.device_state.state
        assert state.adapter is None and engine.adapters is None
        assert engine.scheduler.updates.empty_batch(False).adapter is None
        assert engine.programs.decoder == model.decoder and engine.programs.params is model.params
        with pytest.raises(RequestError, match="adapter must be None unless enable_lora is on; got 'a'"):
            engine.submit(engine_request("x", prompt(5), adapter="a"))
        with pytest.raises(RequestError, match="enable_lora must be on"):
            engine.load_adapter("a", "/nowhere")


@pytest.mark.slow
def test_a_prefix_is_shared_under_one_adapter_only(adapted):
    ids = prompt(41, 77)
    cached = lambda **fields: run(adapted, engine_request("p", ids, **fields))[0][1].cached_tokens
    for adapter, salt in itertools.product((None, "a", "b"), (None, "s")):
        assert [cached(adapter=adapter, cache_salt=salt) for _ in range(2)] == [0, 40], (adapter, salt)
    roots = {root_hash(*key) for key in itertools.product(((), (0,), (1,)), (0, 1), ("", "s"))}
    assert len(roots) == 12


@pytest.mark.slow
def test_preemption_keeps_the_adapter(model, paths, expected):  # noqa: F811
    for engine in engine_of(model, **{**LORA, "batch_invariant": True}, num_pages=28):  # one batch bucket
        for name, path in paths.items():
            engine.load_adapter(name, path)
        assert tokens_of(run(engine, *mixed())) == expected
        assert engine.snapshot()["preemptions"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "drafter",
    ["suffix", "pruned", "auto"],
)
def test_drafts_are_verified_under_the_adapter(
    model,  # noqa: F811
    paths,
    adapted,
    drafter,
    monkeypatch,
):
    cheap = PassCosts((1, 256), (1.0, 1.2), (1, 16), (0.0, 0.0), draft_step=(0.01, 0.0))
    monkeypatch.setattr(programs, "known_costs", lambda *_: cheap)
    ids = prompt(12, 5) * 4
    requests = [
        engine_request(f"d{i}", ids[i:], adapter=adapter, seed=i, temperature=0.3 * (i % 2), max_tokens=24)
        for i, adapter in enumerate(("a", None, "b", "c", "a"))
    ]
    plain = tokens_of(run(adapted, *requests))
    for engine in engine_of(model, **LORA, speculate=drafter, num_speculative_tokens=3, max_num_seqs=2):
        for name, path in paths.items():
            engine.load_adapter(name, path)
        results = run(engine, *requests)
        assert tokens_of(results) == plain
        assert sum(last.summary["num_drafted"] for _, last in results) > 0


@pytest.mark.slow
def test_an_adapter_is_replaced_while_requests_run(model, paths, expected):  # noqa: F811
    for engine in engine_of(model, **{**LORA, "max_loras": 1, "batch_invariant": True}):
        first, second = (
            engine_request("r1", prompt(30, 0), seed=1, adapter="a", **WARM),
            engine_request("r2", prompt(30, 1), seed=2, adapter="b", **WARM),
        )
        engine.load_adapter("a", paths["a"])
        with pytest.raises(RequestError, match="all 1 \\(max_loras\\) are in use; got 'b'"):
            engine.load_adapter("b", paths["b"])
        with pytest.raises(RequestError, match="lora_name must not be a loaded adapter; got 'a'"):
            engine.load_adapter("a", paths["a"])
        stream = engine.submit(first)
        engine.unload_adapter("a")
        with pytest.raises(RequestError, match="model must name a loaded adapter; got 'a'"):
            engine.submit(first)
        assert [t.id for d in stream for t in d.tokens] == expected[1]  # it finishes under its adapter
        compiled = engine.programs.compilations
        engine.load_adapter("b", paths["b"])
        assert tokens_of(run(engine, second)) == [expected[2]]
        engine.unload_adapter("b")
        engine.load_adapter("a", paths["c"])  # another adapter of the same name, in the same slot
        result, last = run(engine, dataclasses.replace(first, id="again"))[0]
        assert last.cached_tokens == 0 and result != expected[1]
        assert engine.programs.compilations == compiled
        assert engine.adapters.describe() == {
            "loaded": {"a": 0},
            "slots": 1,
            "slots_free": 0,
            "max_lora_rank": 8,
        }
        with pytest.raises(RequestError, match="lora_name must be a loaded adapter; got 'b'"):
            engine.unload_adapter("b")


def test_a_slot_is_taken_until_its_last_request_ends(adapted, paths):
    slots = adapted.adapters
    free, users = slots.describe()["slots_free"], [slots.acquire("a") for _ in range(2)]
    adapted.unload_adapter("a")
    for user in users:
        assert slots.describe()["slots_free"] == free
        with pytest.raises(RequestError, match="model must name a loaded adapter; got 'a'"):
            slots.acquire("a")
        slots.release(user)
    assert slots.describe()["slots_free"] == free + 1
    adapted.load_adapter("a", paths["a"])
    assert slots.describe()["loaded"]["a"] == 0


def test_a_name_is_taken_while_its_adapter_is_loaded(adapted, paths):
    slots = adapted.adapters
    adapted.unload_adapter("b")

    def in_engine(put):
        with pytest.raises(RequestError, match="lora_name must not be a loaded adapter; got 'b'"):
            adapted.load_adapter("b", paths["b"])
        with pytest.raises(RequestError, match="model must name a loaded adapter; got 'b'"):
            slots.acquire("b")
        return adapted._in_engine(put)

    slots.load("b", paths["b"], in_engine, adapted.programs.replace_adapters)
    assert slots.names()["b"] == paths["b"]


def test_a_broken_adapter_leaves_its_slot_free(adapted, tmp_path):
    free = adapted.adapters.describe()["slots_free"]
    adapted.unload_adapter("c")
    message = "lora_path must be an adapter that can be served: adapter must be a"
    for _ in range(2):  # its name stays free as well
        with pytest.raises(RequestError, match=message):
            adapted.load_adapter("c", str(tmp_path / "missing"))
    assert adapted.adapters.describe()["slots_free"] == free + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": "yes"}, "enable_lora must be true or false; got 'yes'"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras must be an integer between 1 and 1024; got 0"),
        ({"enable_lora": True, "max_lora_rank": 513}, "max_lora_rank must be an integer between 1 and 512"),
        ({"lora_modules": (LoRAModule("a", "b"),)}, "lora_modules must be empty unless enable_lora is on"),
        ({"enable_lora": True, "lora_modules": (LoRAModule("a", "b"),) * 2}, "different names"),
        (
            {
                "enable_lora": True,
                "max_loras": 1,
                "lora_modules": (LoRAModule("a", "b"), LoRAModule("c", "d")),
            },
            "max_loras must be at least 2, the number of lora_modules; got 1",
        ),
        ({"enable_lora": True, "tensor_parallel_size": 2}, "enable_lora must be off with several devices"),
        ({"enable_lora": True, "data_parallel_size": 2}, "enable_lora must be off with several devices"),
        (
            {"enable_lora": True, "speculate": "/"},
            "speculate must not name a draft model or head together with enable_lora",
        ),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ParameterError, match=message):
        EngineOptions(**options)
