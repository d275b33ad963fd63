"""`entropic generate --method NAME`."""

import json
from pathlib import Path

import pytest

from entropic_jax.methods.registry import METHODS
from entropic_jax.parameter_tables.prefill_options import SPARSE_METHODS
from entropic_jax.serving.options import control_options


def test_the_command_line_knows_every_method():
    assert tuple(METHODS) == control_options.METHODS
    assert set(SPARSE_METHODS) == {name for name, entry in METHODS.items() if entry.prefill is not None}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["snapkv", "adakv", "quest"])
def test_a_method_says_what_it_keeps_in_the_trace(entropic, directory, name):
    common = ("generate", "--model", directory, "--prompt", "a" * 90, "--json", "--temperature", "0")
    common += ("--max-tokens", "30", "--ignore-eos", "--seed", "1")
    dense = json.loads(entropic(*common, "--preset", "off")[1])
    status, out, _ = entropic(*common, "--method", name, "--cache-budget", "128")
    assert status == 0 and json.loads(out)["token_ids"] == dense["token_ids"]
    status, out, _ = entropic(*common, "--method", name, "--cache-budget", "64")
    tree = json.loads(out)
    assert (status, tree["finish_reason"], len(tree["token_ids"])) == (0, "length", 30)
    if name != "quest":  # which reads both layers of this model whole
        assert min(tree["trace"]["cost"]) < min(dense["trace"]["cost"])


def test_what_does_not_go_together_is_said(entropic, directory):
    arguments = (
        "generate",
        "--model",
        directory,
        "--prompt",
        "a",
        "--method",
        "quest",
        "--preset",
        "meso-lossy",
    )
    status, _, errors = entropic(*arguments)
    assert status == 2 and "error: --method quest: preset must be off, micro or macro with" in errors
    status, _, errors = entropic(*arguments[:-2], "--cache-budget", "3")
    assert status == 2 and "error: --cache-budget must be an integer of at least 64; got 3" in errors


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("segment", "100", "must be a power of two between 64 and 32768; got 100"),
        ("segment", "a", "must be a power of two between 64 and 32768; got a"),
        ("dense-below", "-1", "must be an integer between 0 and 2147483647; got -1"),
        ("tolerance", "11", "must be a number between 0 and 10; got 11"),
        ("growth", "nan", "must be a number between 0 and 100; got nan"),
        ("rigid-below", "1.1", "must be a number between 0 and 1; got 1.1"),
        ("least-share", "2", "must be a number between 0 and 1; got 2"),
    ],
)
def test_ranges_of_prefill_options(entropic, directory, option, value, said):
    arguments = ("generate", "--model", directory, "--prompt", "a", f"--prefill-{option}={value}")
    status, _, errors = entropic(*arguments)
    assert status == 2 and f"error: --prefill-{option} {said}" in errors


def write_table(directory, tmp_path, **changes) -> str:
    """A table of head needs for the model of a directory, in which heads differ."""
    config = json.loads((Path(directory) / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    tree = {
        "version": 1,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden": config["hidden_size"],
        "vocabulary": config["vocab_size"],
        "tokens": 64,
        "segment": 32,
        "page_size": 16,
        "budget": 64,
        "dense_layers": 1,
        "need": [[1 + 5 * head for head in range(kv_heads)] for _ in range(layers)],
    }
    (file := tmp_path / "needs.json").write_text(json.dumps(tree | changes))
    return str(file)


@pytest.mark.slow
def test_a_budget_is_shared_by_a_table(entropic, directory, tmp_path):
    common = ("generate", "--model", directory, "--prompt", "a" * 110, "--json", "--temperature", "0")
    common += ("--max-tokens", "8", "--ignore-eos", "--seed", "1")
    dense = json.loads(entropic(*common, "--preset", "off")[1])
    table = write_table(directory, tmp_path)
    options = ("--method", "budgeted-prefill", "--prefill-table", table, "--prefill-segment", "64")
    status, out, errors = entropic(*common, *options, "--prefill-dense-below", "0", "--prefill-entropy")
    assert (status, errors) == (0, "") and json.loads(out)["token_ids"] == dense["token_ids"]
    table = write_table(directory, tmp_path, hidden=17)
    status, _, errors = entropic(*common, *options)
    assert status == 2 and "the table of head needs is of another model: hidden must be" in errors


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--preset", "micro", "--lowest-temperature", "5", "--highest-temperature", "1.2"),
            "--lowest-temperature must be below --highest-temperature = 1.2; got 5",
        ),
        (
            ("--lowest-dropped-mass-limit", "0.2"),
            "--lowest-dropped-mass-limit must be at most --dropped-mass-limit = 0.02; got 0.2",
        ),
        (
            ("--method", "snapkv", "--cache-budget", "0"),
            "--cache-budget must be an integer of at least 64; got 0",
        ),
        (
            ("--preset", "micro", "--law", "dynatemp", "--lowest-temperature", "0.5"),
            "--lowest-temperature must not be set with the law dynatemp, which ignores it; got 0.5",
        ),
        (
            ("--preset", "paper", "--law", "exact"),
            "--law must not be set with the preset paper, which ignores it; got 'exact'",
        ),
        (
            ("--preset", "micro", "--dropped-mass-limit", "0.1"),
            "--dropped-mass-limit must not be set with the preset micro, which has no page selection; got",
        ),
        (
            ("--lowest-temperature", "0.5"),
            "--lowest-temperature must not be set with the preset meso, which has no temperature law",
        ),
        (
            ("--preset", "micro", "--lowest-temperature", "5", "--temperature", "0.7"),
            "--lowest-temperature must be at most --temperature = 0.7 while --highest-temperature is 0",
        ),
        (
            ("--method", "budgeted-prefill"),
            "--prefill-table must be set with the method budgeted-prefill: a file that",
        ),
        (
            ("--method", "budgeted-prefill", "--prefill-table", "no.json"),
            "--prefill-table must be a table of head needs: the table must be a file written by",
        ),
        (
            ("--method", "uniform-prefill", "--prefill-growth", "2"),
            "--prefill-growth must not be set with the method uniform-prefill, which does not have it (only",
        ),
        (
            ("--prefill-segment", "256"),
            "--prefill-segment must not be set with the method dense, which does not have it (only",
        ),
        (("--branches", "2"), "--branches needs the preset entropix; got the preset meso"),
        (("--target-entropy", "auto"), "--target-entropy must be a number for a model without calibration"),
    ],
)
def test_an_error_names_the_option_at_fault(entropic, directory, options, said):
    status, _, errors = entropic("generate", "--model", directory, "--prompt", "a", *options)
    assert status == 2 and f"error: {said}" in errors
