"""Which back ends serve an engine: on accelerators kernels by default, and never plain JAX without a word."""

import json
import logging
from types import SimpleNamespace

import jax
import pytest

from entropic_jax import models
from entropic_jax.methods import presets
from entropic_jax.models.decoder import structure
from entropic_jax.pallas import dispatch, paged_attention, self_test
from entropic_jax.pallas.paged_attention.quantised import bytes_per_number
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving import memory
from entropic_jax.serving.cli import main
from entropic_jax.serving.engine import kernel_report
from entropic_jax.serving.engine.options import EngineOptions, sizes
from entropic_jax.serving.options.kv_cache import pages_of

ACCELERATORS = ("tpu", "gpu")


@pytest.fixture
def use_accelerator(monkeypatch):
    """Trace for a platform whose compiler is not needed: nothing is compiled."""

    def use(platform):
        device = SimpleNamespace(platform=platform, compute_capability="9.0")
        for module in (paged_attention, dispatch, kernel_report):
            monkeypatch.setattr(module, "default_device", lambda: device)
        monkeypatch.setattr(memory, "available_memory", lambda: None)
        monkeypatch.delenv("ENTROPIC_KERNELS", raising=False)

    return use


def engine_of(head_dim=128, experts=0, quantization=None, stacked=False, **options):
    mixture = dict(num_local_experts=experts, num_experts_per_tok=2) if experts else {}
    config = models.Config(
        architecture="MixtralForCausalLM" if experts else "LlamaForCausalLM",
        vocab_size=256,
        hidden_size=2 * head_dim,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        **mixture,
    )

    def stored(path, x):
        narrowed = x.dtype == "float32" and (path[-1].key != "scale" or path[0].key == "embed_tokens")
        return jax.ShapeDtypeStruct(x.shape, "bfloat16" if narrowed else x.dtype)

    shapes = structure(config, quantization, stacked=stacked)[1]
    params = jax.tree_util.tree_map_with_path(stored, shapes)
    model = models.Model(config, params, quantization=quantization, stacked=stacked)
    chosen = EngineOptions(max_num_seqs=4, num_pages=64, max_model_len=1024, **options)
    itemsize = bytes_per_number(pages_of(chosen.kv_cache_dtype, params), head_dim)
    return model, chosen, sizes(model, chosen, itemsize)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ACCELERATORS)
@pytest.mark.parametrize("preset", ["off", "full", "full-lossy"])
@pytest.mark.parametrize(("head_dim", "cache_dtype"), [(128, "auto"), (64, "int8_per_token_head")])
def test_kernels_serve_attention_by_default(platform, preset, head_dim, cache_dtype, use_accelerator):
    use_accelerator(platform)
    engine = engine_of(head_dim, preset=preset, kv_cache_dtype=cache_dtype)
    assert engine[2].page_size == 128
    served = {x.operation.rpartition(".")[2]: x for x in kernel_report.report(*engine)}
    attention = {"decode", "prefill", *(["verify"] if preset == "full" else ["select_pages"])}
    assert attention <= set(served)
    assert {served[name].backend for name in attention - {"select_pages"}} == {platform}
    policies = engine[2].shapes.page_policies
    assert preset == "full" or policies[-1].rules == presets.WIDE_PAGES.rules


def test_pages_on_a_cpu_are_as_they_were():
    assert [engine_of(preset=name)[2].page_size for name in ("off", "full", "full-lossy")] == [16, 64, 16]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ACCELERATORS)
def test_a_page_size_that_a_kernel_declines_is_refused(platform, use_accelerator):
    use_accelerator(platform)
    with pytest.raises(ParameterError, match=r"block_size must be .* as 128: .* got 16") as error:
        kernel_report.report(*engine_of(kv_cache_dtype="int8_per_token_head", block_size=16))
    assert error.value.param == "block_size" and "page_size 16" in str(error.value)
    kernel_report.report(*engine_of(kv_cache_dtype="int8_per_token_head", block_size=256))


def warnings_of(caplog, *engine):
    with caplog.at_level(logging.WARNING, kernel_report.__name__):
        kernel_report.report(*engine)
    return caplog.text


def test_the_page_size_of_a_method_is_used_with_a_warning(use_accelerator, caplog):
    use_accelerator("tpu")
    engine = engine_of(64, method="entropy-prefill", preset="off", pruning=False)
    assert engine[2].page_size == 16
    text = warnings_of(caplog, *engine)
    assert "paged_attention.decode is computed by plain JAX" in text and "page_size 16, not 128" in text


def test_what_no_page_size_helps_is_served_with_a_warning(use_accelerator, caplog):
    use_accelerator("gpu")
    text = warnings_of(caplog, *engine_of(96, block_size=16))
    assert "paged_attention.decode is computed by plain JAX" in text and "head_dim 96" in text


def test_the_log_says_who_serves(use_accelerator, caplog):
    use_accelerator("tpu")
    with caplog.at_level(logging.INFO, kernel_report.__name__):
        kernel_report.report(*engine_of(64))
    (record,) = caplog.records
    assert (record.page_size, record.decode) == (128, "tpu")
    assert record.write.startswith("xla (head_dim 64 is not a multiple of 128")


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("quantization", "served"), [(None, True), ("int8", True), ("int4", False)])
@pytest.mark.parametrize("platform", ACCELERATORS)
def test_the_log_says_who_multiplies_experts(
    platform, quantization, served, stacked, use_accelerator, caplog
):
    use_accelerator(platform)
    with caplog.at_level(logging.INFO, kernel_report.__name__):
        kernel_report.report(*engine_of(experts=4, quantization=quantization, stacked=stacked))
    text = caplog.records[-1].grouped_matmul
    if served:
        assert text == platform
    else:
        assert text.startswith("xla (") and ("packed weights" if platform == "tpu" else "uint8") in text


@pytest.mark.slow
def test_the_doctor_examines_a_configuration(directory, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(self_test, "checks", list)
    monkeypatch.setenv("ENTROPIC_KERNELS", "xla")  # to ask the kernels for a CPU is to compile them
    file = tmp_path / "server.yaml"
    options = f"model: {directory}\npreset: full-lossy\nkv-cache-dtype: int8_per_token_head\n"
    file.write_text(options + "max-num-seqs: 2\n")
    assert main(["doctor", "--json", "--config", str(file)]) == 0
    server = json.loads(capsys.readouterr().out)["server"]
    assert (server["page_size"], server["kv_cache_dtype"]) == (16, "int8")
    assert server["operations"]["paged_attention.select_pages"].startswith("xla")
    assert main(["doctor", "--config", str(file)]) == 0
    assert "server: pages of 16 positions of int8" in capsys.readouterr().out
    file.write_text("block-sizes: 16\n")
    with pytest.raises(SystemExit):
        main(["doctor", "--config", str(file)])
    assert "has no flag block-sizes" in capsys.readouterr().err
