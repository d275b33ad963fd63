"""Arms of the benchmark of speculation."""

import dataclasses

import chex

from benchmarks.speculation.workload import with_restless
from entropic_jax.speculation import speculator


def test_the_arm_without_rests_differs_in_nothing_else():
    by_name = with_restless({"off": None, "suffix": speculator(1)})
    assert list(by_name) == ["off", "suffix", "suffix, no rests"]
    rested, restless = by_name["suffix"], by_name["suffix, no rests"]
    assert restless.longest_rest == 0 < rested.longest_rest
    chex.assert_trees_all_equal(dataclasses.replace(restless, longest_rest=rested.longest_rest), rested)
