"""Sown faults of the kernels are caught by the tests: `pytest -m mutation` (slow)."""

import pytest

from ..mutation import runner
from . import mutations
from .mutants import MUTANTS


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    runner.copy_tree(folder)
    return folder


def test_every_fault_has_its_place_in_the_source():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    sources = {mutant.file: (runner.ROOT / mutant.file).read_text("utf-8") for mutant in MUTANTS}
    misplaced = [m.name for m in MUTANTS if sources[m.file].count(m.old) != 1 or m.old == m.new]
    assert misplaced == []


@pytest.mark.mutation
@pytest.mark.parametrize("tests", sorted({mutant.tests for mutant in MUTANTS}), ids=lambda t: t.expression)
def test_the_tests_pass_without_a_fault(tests, tree):
    assert (output := mutations.failure(tree, tests)) is None, output


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_fault_is_caught(mutant, tree):
    assert mutations.mutation_failure(tree, mutant) is not None
