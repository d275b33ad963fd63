"""`entropic generate --method NAME`."""

import json

import pytest

from entropic_jax.methods.registry import METHODS
from entropic_jax.serving.options import control_options


def test_the_command_line_knows_every_method():
    assert tuple(METHODS) == control_options.METHODS


@pytest.mark.slow
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
    ("options", "said"),
    [
        (
            ("--preset", "micro", "--lowest-temperature", "5", "--highest-temperature", "1.2"),
            "--lowest-temperature must be below --highest-temperature = 1.2; got 5",
        ),
        (
            ("--lowest-dropped-mass-limit", "0.2"),
            "--lowest-dropped-mass-limit must be at most --dropped-mass-limit = 0.03; got 0.2",
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
            "--lowest-temperature must be at most temperature = 0.7 while --highest-temperature is 0; got 5",
        ),
        (("--branches", "2"), "--branches needs the preset entropix; got the preset meso"),
        (("--target-entropy", "auto"), "--target-entropy must be a number for a model without calibration"),
    ],
)
def test_an_error_names_the_option_at_fault(entropic, directory, options, said):
    status, _, errors = entropic("generate", "--model", directory, "--prompt", "a", *options)
    assert status == 2 and f"error: {said}" in errors
