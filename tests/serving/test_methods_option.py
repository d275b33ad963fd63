"""`entropic generate --method NAME`."""

import json

import pytest

from entropic_jax.methods.registry import METHODS
from entropic_jax.serving import control_options


def test_the_command_line_knows_every_method():
    assert tuple(METHODS) == control_options.METHODS


@pytest.mark.parametrize("name", ["snapkv", "adakv", "quest"])
def test_a_method_says_what_it_keeps_in_the_trace(entropic, directory, name):
    common = ("generate", "--model", directory, "--prompt", "a" * 90, "--json", "--temperature", "0")
    common += ("--max-tokens", "30", "--ignore-eos", "--seed", "1")
    dense = json.loads(entropic(*common)[1])
    status, out, _ = entropic(*common, "--method", name, "--cache-budget", "128")
    assert status == 0 and json.loads(out)["token_ids"] == dense["token_ids"]
    status, out, _ = entropic(*common, "--method", name, "--cache-budget", "64")
    tree = json.loads(out)
    assert (status, tree["finish_reason"], len(tree["token_ids"])) == (0, "length", 30)
    if name != "quest":  # which reads both layers of this model whole
        assert min(tree["trace"]["cost"]) < min(dense["trace"]["cost"])


def test_what_does_not_go_together_is_said(entropic, directory):
    given = ("generate", "--model", directory, "--prompt", "a", "--method", "quest", "--preset", "meso")
    status, _, errors = entropic(*given)
    assert status == 2 and "must be off, micro or macro beside 'quest'" in errors
    status, _, errors = entropic(*given[:-2], "--cache-budget", "3")
    assert status == 2 and "budget must be an integer of at least 64; got 3" in errors
