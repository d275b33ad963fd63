"""Keyword arguments of `LLM`: what is refused by name, and where the others go."""

import threading

import numpy as np
import pytest

from entropic_jax import LLM
from entropic_jax.parameter_tables.table import ParameterError
from entropic_jax.serving.llm.options import ENGINE_NAMES, GAIN_NAMES, read_options

SIZES = dict(max_num_seqs=4, max_model_len=256)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_num_sequences": 4}, TypeError, r"max_num_sequences; did you mean max_num_seqs\?"),
        ({"zzz": 4}, TypeError, "zzz; its arguments are model, preset, seed, dtype"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs"),
        ({"kv_cache_dtype": "int3"}, ValueError, "kv_cache_dtype"),
        ({"preset": "hot"}, ValueError, "one of off, micro, meso, macro, full, meso-lossy, full-lossy, "),
        ({"model": "/nowhere/at/all"}, (OSError, ValueError), "/nowhere/at/all"),
        ({"preset": "micro", "law": "none"}, ValueError, "law must be one of paper, .*; got 'none'"),
    ],
)
def test_options_that_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        LLM(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": True}, "max_num_seqs must be an integer between 1 and 4096; got True"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be a number above 0 and at most 1"),
        ({"num_pages": 10**12}, "num_pages must be at most [0-9]+ with .* available, at [0-9]+ bytes a page"),
        ({"block_size": True}, "block_size must be an integer between 1 and 2147483647; got True"),
        ({"max_steps": 2**40}, "max_steps must be an integer between 1 and 4096; got 1099511627776"),
        ({"max_num_batched_tokens": 10**40}, "max_num_batched_tokens must be an integer between 1 and .*"),
        (
            {"gpu_memory_utilization": 1e-9},
            "gpu_memory_utilization must leave [0-9]+ bytes, .*; got 1e-09",
        ),
        ({"block_size": 10**9}, "block_size must be at most [0-9]+, .*; got 1000000000"),
        ({"kv_cache_bytes": 5}, "kv_cache_bytes must be at least [0-9]+, for one page; got 5"),
        ({"prefill_options": (1, 2)}, "prefill_options must be a mapping with keys among .*; got \\(1, 2\\)"),
        ({"speculate": "x" * 300}, "speculate must be .*; got 'xxx"),
        ({"max_num_seqs": 10**9}, "max_num_seqs must be an integer between 1 and 4096; got 1000000000"),
        (
            {"max_num_seqs": 10**5000},
            "max_num_seqs must be an integer between 1 and 4096; got a very large integer",
        ),
        ({"max_model_len": 8193}, "max_model_len must be at most 8192, .*; got 8193"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens must be at least [0-9]+, .* page; got 8"),
        ({"method": "snap"}, "method must be one of dense, entropyinfer, .*; got 'snap'"),
        ({"method": 3}, "method must be one of dense, .*; got 3"),
        (
            {"budgets": {"base": 64}},
            "budgets must have no keys but prefill_budget and cache_budget; got 'base'",
        ),
        (
            {"budgets": {"prefill_budget": 0}},
            "budgets must map prefill_budget to an integer of at least 64; got 0",
        ),
        ({"budgets": {"prefill_budget": True}}, "budgets must map prefill_budget to an integer .*; got True"),
        (
            {"budgets": {"cache_budget": 64}},
            "budgets must not have the key cache_budget with the method dense; got 64",
        ),
        ({"budgets": 64}, "budgets must be a mapping with the keys prefill_budget and cache_budget; got 64"),
        ({"seed": "x"}, "seed must be an integer between .*; got 'x'"),
        ({"seed": True}, "seed must be an integer between .*; got True"),
        ({"seed": 2**63}, "seed must be an integer between .*; got 9223372036854775808"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be true or false; got 1"),
        ({"pruning": "no"}, "pruning must be true or false; got 'no'"),
        ({"batch_invariant": 0}, "batch_invariant must be true or false; got 0"),
        ({"clarification": 3, "preset": "entropix"}, "clarification must be a string; got 3"),
        ({"clarification": "x"}, "clarification needs the preset entropix; got the preset meso"),
        (
            {"num_speculative_tokens": 3, "speculative_config": {"method": "ngram"}},
            "num_speculative_tokens must not be set together with speculative_config; got 3",
        ),
        ({"kv_cache_memory_bytes": "x"}, "kv_cache_memory_bytes must be .*; got 'x'"),
        ({"lora_modules": "x", "enable_lora": True}, "lora_modules must be a list of LoRAModule; got 'x'"),
        (
            {"lora_modules": (("a", "/x"),), "enable_lora": True},
            "lora_modules must be a list of LoRAModule; got",
        ),
    ],
)
def test_engine_options_that_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        LLM(**options)


def test_a_model_that_is_no_path_is_refused():
    with pytest.raises(TypeError, match=r"^model must be a path, as a string or Path; got 3"):
        LLM(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"preset": "micro", "lowest_temperature": 5, "highest_temperature": 2},
            "^lowest_temperature must be",
        ),
        (
            {"preset": "micro", "law": "edt", "target_entropy": 0.5},
            "^target_entropy must not be set with the law edt, which ignores it; got 0.5",
        ),
        (
            {"preset": "micro", "law": "mirostat", "highest_temperature": 0.5},
            "^highest_temperature must not be set with the law mirostat",
        ),
        (
            {"preset": "entropix", "lowest_temperature": 0.5},
            "^lowest_temperature must not be set with the preset entropix; got 0.5",
        ),
        (
            {"preset": "dslider", "law": "exact"},
            "^law must not be set with the preset dslider; got 'exact'",
        ),
        (
            {"preset": "meso", "lowest_temperature": 0.5},
            "^lowest_temperature must not be set with the preset meso, which has no temperature law; got 0.5",
        ),
        ({"dtype": "int3"}, "^dtype must be one of auto, float32, bfloat16, float16; got 'int3'"),
        ({"preset": "macro", "scheduling_policy": "fcfs"}, r"got 'macro' \(the engine does not order"),
        ({"preset": "meso-lossy", "pruning": False}, r"got 'meso-lossy' \(no request may leave pages unread"),
    ],
)
def test_a_refused_control_leaves_no_engine_running(options, message):
    before = [thread for thread in threading.enumerate() if thread.name == "engine"]
    with pytest.raises(ValueError, match=message):
        LLM(**options, **SIZES)
    assert [thread for thread in threading.enumerate() if thread.name == "engine"] == before


def test_options_go_where_they_belong():
    control, options = read_options("micro", {"target_entropy": 0.5, "law": "integral", "dtype": "bfloat16"})
    assert (control.preset, dict(control.gains)) == ("micro", {"law": "integral", "target_entropy": 0.5})
    assert (options.dtype, options.law, options.pruning, options.preset) == (
        "bfloat16",
        "integral",
        False,
        "micro",
    )
    assert (options.scheduling_policy, options.warmup) == ("fcfs", "none")
    assert read_options("full", {"warmup": "min"})[1].scheduling_policy == "entropic"
    control, options = read_options("off", {"method": "snapkv", "budgets": {"cache_budget": 64}})
    assert control.method == options.method == "snapkv" and control.budgets == (("budget", 64),)
    assert not set(ENGINE_NAMES) & set(GAIN_NAMES)


def test_whole_numbers_of_any_type_are_integers():
    stated = {"max_num_seqs": 2.0, "max_model_len": np.int64(64), "tensor_parallel_size": np.int32(1)}
    checked = read_options("off", stated)[1]
    values = [getattr(checked, name) for name in stated]
    assert values == [2, 64, 1] and {type(value) for value in values} == {int}


def test_priority_is_a_name_of_first_come_first_served():
    assert read_options("full", {"scheduling_policy": "priority"})[1].policy == "fcfs"
    assert read_options("full", {})[1].policy == "entropic"


def test_a_name_is_suggested_only_if_it_is_near():
    with pytest.raises(TypeError, match=r"no argument chat_template; its arguments are"):
        read_options("off", {"chat_template": 3})
    with pytest.raises(TypeError, match=r"did you mean max_num_seqs\?"):
        read_options("off", {"max_num_sequences": 3})


def test_the_size_of_the_kv_cache_by_the_name_of_vllm():
    assert read_options("off", {"kv_cache_memory_bytes": 2**24})[1].kv_cache_bytes == 2**24
    stated = {"kv_cache_memory_bytes": None, "kv_cache_bytes": 2**25}
    assert read_options("off", stated)[1].kv_cache_bytes == 2**25
    message = "^kv_cache_memory_bytes must not be set together with kv_cache_bytes, which is the same; got 1"
    with pytest.raises(ParameterError, match=message):
        read_options("off", {"kv_cache_memory_bytes": 1, "kv_cache_bytes": 1})


def test_an_empty_path_is_no_drafter():
    for options, name in (
        ({"speculative_config": {"model": ""}}, "speculative_config"),
        ({"speculate": ""}, "speculate"),
    ):
        with pytest.raises(ParameterError, match=f"^{name} must .*; got ''") as error:
            read_options(None, options)
        assert error.value.param == name
