"""Layers that are scanned compute what unrolled layers compute, and copy no pool of pages."""

import itertools
import re
from functools import cache as once
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, generate, models, parameters, start
from entropic_jax.attention.attend import TokenSpan, attend_to
from entropic_jax.attention.page_selection import Selection
from entropic_jax.attention.statistics import Observation
from entropic_jax.attention.window_pages import WindowPages
from entropic_jax.control.pruning import FixedPruning
from entropic_jax.mesh import make_mesh
from entropic_jax.methods import cache_compression, presets
from entropic_jax.methods.expert_selection import FixedExperts
from entropic_jax.methods.method import Method
from entropic_jax.methods.snapkv import SnapKV
from entropic_jax.methods.uniform_budget import UniformBudget
from entropic_jax.models import layer_stack
from entropic_jax.models.config_json import from_json
from entropic_jax.models.layer_stack import layer_pattern, stack_layers
from entropic_jax.models.model import quantised
from entropic_jax.pallas.paged_attention import SelectionRules
from entropic_jax.phases.batch import gather_active
from entropic_jax.phases.forward import decode
from entropic_jax.speculation import PrunedDrafter, Speculator
from entropic_jax.speculation.draft_length import DraftLength
from entropic_jax.state import cache
from entropic_jax.state.layer_stacks import LayerPattern, LayerStacks, Place
from tests.marks import exhaustive, keep
from tests.models.family_cases import CASES, SIZES

ROWS, CONTEXT, PAGE, STEPS = 4, 96, 8, 12
SLIDING, FULL = "sliding_attention", "full_attention"
# A model, the pattern of its layers, and how many layers are traced.
MODELS: dict[str, tuple[str, dict[str, Any], LayerPattern]] = {
    "llama": ("Llama", {"num_hidden_layers": 4}, LayerPattern(0, 1, 4)),
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 8, "head_dim": 8, "sliding_window": 7}
        | {"layer_types": [SLIDING, SLIDING, FULL] * 2 + [SLIDING] * 2},
        LayerPattern(0, 3, 2),
    ),
    "dense first": (
        "Glm4Moe",
        {"num_hidden_layers": 4},
        LayerPattern(1, 1, 3),
    ),
    "gpt-oss": ("GptOss", {"num_hidden_layers": 4}, LayerPattern(0, 2, 2)),
}


@once
def model_of(name: str) -> models.Model:
    """A tiny model with random weights, of the first configuration of its family with changes."""
    family, changes, _ = MODELS[name]
    of_family = next((case for other, case in CASES if other == family), {})
    raw = {**SIZES, **of_family, **changes, "architectures": [f"{family}ForCausalLM"]}
    return models.initialise(from_json(raw, models.FAMILIES[f"{family}ForCausalLM"]), seed=0)


def both(name: str, quantization: str | None = None) -> tuple[models.Model, models.Model]:
    """A model with separate layers, and with stacked ones."""
    model = model_of(name)
    model = model if quantization is None else quantised(model, quantization)
    parts = jax.tree.map(lambda x: x, model.params)  # other dicts of the same arrays
    return model, stack_layers(models.Model(**{**vars(model), "params": parts}))


def begin(model: models.Model, preset: Any, **options: Any) -> Any:
    """A state with prompts of several lengths, greedy and sampled."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, SIZES["vocab_size"], n).tolist() for n in (30, 1, 17, 41)]
    sampling = parameters(ROWS, temperature=[0.0, 0.8, 1.2, 0.0], top_p=[1.0, 0.9, 1.0, 1.0])
    pool = allocate(model.decoder.shape, ROWS, CONTEXT, page_size=PAGE, dtype=options.pop("dtype", "float32"))
    pool = pool._replace(layers=jax.tree.map(lambda x: jnp.full_like(x, poison(x)), pool.layers))
    return start(
        model.decoder,
        model.params,
        preset.controller,
        pool,
        texts,
        key=jax.random.key(3),
        max_tokens=STEPS,
        sample=sampling,
        page_policy=preset.page_policy,
        **options,
    )


def poison(x: jax.Array) -> float:
    """What unused memory holds."""
    return float("nan") if jnp.issubdtype(x.dtype, jnp.floating) else 77


def tokens_of(model: models.Model, preset: Any, steps: int = STEPS, **options: Any) -> tuple[Any, Any]:
    """Tokens and trace of a run."""
    state = begin(model, preset, **options)
    speculator = options.get("speculator")
    state, trace = generate(
        model.decoder, model.params, preset.controller, state, steps, capacity=steps, speculator=speculator
    )
    return state, jax.device_get(trace)


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal tokens, and measurements up to rounding."""
    np.testing.assert_array_equal(ours.emitted, theirs.emitted)
    np.testing.assert_array_equal(ours.token[ours.emitted], theirs.token[theirs.emitted])
    for name in ("entropy", "kept_fraction", "certificate"):
        x, y = (np.asarray(getattr(trace, name))[trace.emitted] for trace in (ours, theirs))
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", *exhaustive("dense first", "llama", "gpt-oss")])
def test_scanned_layers_give_the_tokens_of_unrolled_ones(name):
    plain, stacked = both(name)
    pattern = MODELS[name][2]
    assert stacked.decoder.pattern == pattern and plain.decoder.pattern is None
    off = presets.preset("off")
    (_, expected), (state, actual) = (tokens_of(model, off) for model in (plain, stacked))
    assert expected.emitted.sum() == ROWS * STEPS
    assert_same(actual, expected)
    assert isinstance(state.cache.layers, LayerStacks)


# What reads pages in a step, and how many bodies are traced: one, or one for each layer.
RULES = SelectionRules(1, 1, 1)
POLICIES = {
    "every step": Selection(dense_layers=1, first_layer_scale=1.5, rules=RULES),
    "shared lists": Selection(dense_layers=1, layers_per_list=2, rules=RULES),
    "kept lists": Selection(dense_layers=1, refresh=3, rules=RULES),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    keep(itertools.product(("llama", "dense first"), POLICIES), ("dense first", "shared lists")),
)
def test_pages_are_chosen_as_in_unrolled_layers(name, policy):
    lossy = presets.Preset(chain(FixedPruning(0.4)), POLICIES[policy], None, None)
    (_, expected), (_, actual) = (tokens_of(model, lossy) for model in both(name))
    assert expected.kept_fraction[expected.emitted].min() < 0.9, "nothing is left unread"
    assert_same(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *exhaustive("gemma3")])
def test_drafts_and_verification_are_those_of_unrolled_layers(name):
    off, window = presets.preset("off"), WindowPages(recent_pages=1, dense_layers=1)
    drafter: Any = PrunedDrafter(
        jnp.array([0.9]), jnp.zeros(0), stop_below=0.5, shortest_context=0, pages=window, most_tokens=2
    )
    speculator = Speculator(drafter, DraftLength(jnp.ones(2, jnp.float32), widths=(1, 3)))
    (_, expected), (_, actual) = (tokens_of(model, off, speculator=speculator) for model in both(name))
    assert expected.from_draft.any()
    assert_same(actual, expected)


def launch_text(model: models.Model, speculator: Any = None) -> tuple[str, Any]:
    """A launch of decode steps as compiled, and its state."""
    off = presets.preset("off")
    state = begin(model, off, speculator=speculator)
    lowered = generate.lower(model.decoder, model.params, off.controller, state, 5, speculator=speculator)
    return lowered.compile().as_text() or "", state


def copies_of(shape: tuple[int, ...], text: str) -> list[str]:
    """The instructions of a program that copy an array of that shape."""
    shaped = re.escape(f"f32[{','.join(map(str, shape))}]")
    assert re.search(shaped, text), "the shape does not occur: the test looks for the wrong thing"
    return re.findall(rf"= {shaped}\S* (?:copy|select|transpose|copy-start|all-gather|slice)\(.*", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", *exhaustive("llama")])
def test_no_copy_of_a_stack_of_pages_or_weights(name):
    model = both(name)[1]
    text, state = launch_text(model)
    pattern = MODELS[name][2]
    for pool in state.cache.layers.pools:
        assert not copies_of(pool.keys.shape, text)
        assert not copies_of(pool.key_sum.shape, text)
    stack = model.params["layers"][pattern.prefix]["mlp"]["down_proj"]["kernel"]
    assert stack.shape[0] == pattern.repeats
    assert not copies_of(stack.shape, text)


@pytest.mark.slow
def test_a_scanned_program_has_the_layers_once():
    texts = [launch_text(model)[0] for model in both("llama")]
    assert [len(re.findall(r'custom_call_target="entropic_write', text)) for text in texts] == [4, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense first", *exhaustive("llama")])
def test_a_quantised_model_is_stacked_with_its_scales(name):
    plain, stacked = both(name, "int8")
    *_, repeated = stacked.params["layers"]
    projections = repeated["mlp"].get("experts", repeated["mlp"])
    assert projections["up_proj"]["scale"].shape[0] == MODELS[name][2].repeats
    (_, expected), (_, actual) = (tokens_of(model, presets.preset("off")) for model in (plain, stacked))
    assert_same(actual, expected)


@pytest.mark.slow
def test_quantised_pages_in_stacks():
    off = presets.preset("off")
    (_, expected), (_, actual) = (tokens_of(model, off, dtype="int8") for model in both("llama"))
    assert_same(actual, expected)


@pytest.mark.slow
def test_policies_of_experts_count_each_layer():
    options = {"expert_policy": FixedExperts(1)}
    off = presets.preset("off")
    (_, expected), (_, actual) = (tokens_of(model, off, **options) for model in both("dense first"))
    assert expected.experts_read.shape[-1] == 3
    np.testing.assert_array_equal(actual.experts_read, expected.experts_read)
    assert_same(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(0, 2), *exhaustive(((-1,),))])
def test_observed_layers_are_those_of_unrolled_ones(layers):
    focuses = []
    for model in both("llama"):
        state = begin(model, presets.preset("off"))
        _, _, batch = gather_active(state, None)
        _, output = jax.jit(decode, static_argnums=(0, 3))(
            model.decoder, model.params, batch, Observation(layers)
        )
        focuses.append(output.focus)
    assert float(focuses[0].entropy.max()) > 0
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), *focuses)


METHODS = {
    "compressed": Method(compression=SnapKV(budget=16, window=4)),
    "sparse prefill": Method(
        prefill=UniformBudget(segment=8, dense_below=16, dense_layers=1, page_size=PAGE)
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["sparse prefill", "compressed"])
def test_methods_read_and_compress_stacks(method):
    traces = []
    for model in both("llama"):
        state = begin(model, presets.Preset(chain(), METHODS[method], None, None))
        state, trace = cache_compression.generate(model.decoder, model.params, chain(), state, STEPS)
        traces.append(jax.device_get(trace))
    assert_same(traces[1], traces[0])


def test_a_stacked_model_is_not_saved_quantised_or_divided(tmp_path):
    stacked = both("llama")[1]
    for action, call in {
        "saved": lambda: models.save(stacked, tmp_path),
        "quantised": lambda: quantised(stacked),
        "divided": lambda: models.shard(stacked, make_mesh(1)),
    }.items():
        with pytest.raises(models.ModelError, match=f"model must be loaded without `stacked` to be {action}"):
            call()


def test_layers_that_differ_in_dtype_stay_separate(caplog):
    plain = both("llama")[0]
    params = jax.tree.map(lambda x: x, plain.params)
    up = params["layers"][1]["mlp"]["up_proj"]
    up["kernel"] = up["kernel"].astype(jnp.bfloat16)
    model = models.Model(plain.config, params)
    assert stack_layers(model) is model and len(model.params["layers"]) == 4
    assert "layers are unrolled" in caplog.text


def test_pages_of_another_layout_are_refused():
    plain, stacked = both("llama")
    tokens, place = jnp.zeros((1, 1), jnp.int32), TokenSpan(jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32))
    stacks = allocate(stacked.decoder.shape, 1, 16, page_size=8)
    with pytest.raises(ValueError, match="caches must be separate"):
        plain.decoder.hidden(plain.params, tokens, tokens, stacks.layers, attend_to(stacks, place))
    with pytest.raises(ValueError, match="caches must be of 4 layers"):
        stacked.decoder.hidden(stacked.params, tokens, tokens, stacks.layers[:0], attend_to(stacks, place))


@pytest.mark.slow
def test_separate_pages_serve_stacked_weights():
    """As in `analysis`, whose copies of a cache have separate layers."""
    plain, stacked = both("dense first")
    tokens = jnp.arange(5, dtype=jnp.int32)[None]
    positions = tokens
    pool = allocate(plain.decoder.shape, 1, 16, page_size=8)
    pool, _ = cache.grant(pool, jnp.array([5]))
    attend = attend_to(pool, TokenSpan(jnp.zeros(1, jnp.int32), jnp.full(1, 5, jnp.int32)))
    hidden = lambda decoder, params: decoder.hidden(params, tokens, positions, pool.layers, attend)[0]
    expected, actual = (
        jax.jit(hidden, static_argnums=0)(model.decoder, model.params) for model in (plain, stacked)
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize(("chosen", "expected"), [("scanned", True), ("unrolled", False), ("", False)])
def test_the_variable_decides(monkeypatch, chosen, expected):
    monkeypatch.setenv(layer_stack.VARIABLE, chosen)
    assert layer_stack.scans_layers() == expected
    monkeypatch.setenv(layer_stack.VARIABLE, "rolled")
    with pytest.raises(ValueError, match="ENTROPIC_LAYERS must be scanned or unrolled; got 'rolled'"):
        layer_stack.scans_layers()


def test_experts_that_xla_would_copy_out_of_a_stack():
    matrix = lambda *shape: {"mlp": {"experts": {"gate_proj": {"kernel": np.zeros((2, *shape))}}}}
    copied = layer_stack.copied_experts
    assert not copied([{"mlp": {}}, matrix(256, 96), matrix(96, 128)])
    assert copied([{"mlp": {}}, matrix(160, 160)]) and copied([matrix(160, 256)], 4)
    assert not copied([matrix(128, 256)], 4)


@pytest.mark.parametrize("layers", ["ab", "abc", "a", ""])
def test_layers_that_do_not_repeat_have_no_pattern(layers):
    assert layer_pattern(tuple(layers)) is None


def test_places_of_a_pattern():
    pattern = layer_pattern(tuple("dwfwfwft"))
    assert pattern == LayerPattern(1, 2, 3)
    places = pattern.places(8)
    assert places[0] == Place(0) and places[7] == Place(3)
    assert places[1:7] == tuple(Place(1 + n % 2, n // 2, 3) for n in range(6))


@pytest.mark.parametrize(("platform", "scanned"), [("cpu", False), ("tpu", True), ("gpu", True)])
def test_accelerators_scan(monkeypatch, tmp_path, platform, scanned):
    monkeypatch.delenv(layer_stack.VARIABLE, raising=False)
    assert layer_stack.scans_layers(platform) == scanned
    monkeypatch.setattr(layer_stack, "default_device", lambda: SimpleNamespace(platform=platform))
    for name in ("llama", "gpt-oss"):
        models.save(model_of(name), tmp_path / name)
        # The experts of this gpt-oss do not fill the lanes of a TPU.
        expected = scanned and (platform, name) != ("tpu", "gpt-oss")
        assert models.load(tmp_path / name, stacked=None).stacked == expected
        assert not models.load(tmp_path / name).stacked
