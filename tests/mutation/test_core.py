"""Faults made by rule in the core are caught by its tests: `pytest -m mutation` (slow)."""

import ast

import pytest

from . import core, runner
from .operators import OPERATORS, sites


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    runner.copy_tree(folder)
    return folder


def test_every_operator_makes_programs():
    source = """
def f(x, y):
    if x < 1 and not y:
        x += min(x, -~y) * 0.5
        print(x)
    return where(x, x + y, 2) if x else y
"""
    faults = sites(source)
    assert {site.operator for site in faults} == set(OPERATORS)
    changed = {site.apply(source) for site in faults}
    assert len(changed) == len(faults) and source not in changed
    for text in changed:
        ast.parse(text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * y", "((x) / (y))"),
        ("x / y", "((x) * (y))"),
        ("x % y", "((x) // (y))"),
        ("x is y", "(x is not y)"),
        ("x is not y", "(x is y)"),
        ("x in y", "(x not in y)"),
        ("x not in y", "(x in y)"),
        ("0.5", "1.0"),
        ("0.0", "1.0"),
    ],
)
def test_what_an_operator_makes(old, new):
    assert [site.new for site in sites(f"def f(x, y):\n    return {old}\n")] == [new]


@pytest.mark.slow
def test_every_fault_is_a_program():
    for file in core.TESTS:
        source = (runner.ROOT / file).read_text("utf-8")
        for site in sites(source):
            ast.parse(site.apply(source))


def test_lines_added_elsewhere_change_no_sample():
    source = "def f(x):\n    return x + 1\n"
    longer = f"import math\n\n\ndef g(x):\n    return x\n\n\n{source}"
    assert [site.rank for site in sites(source)] == [site.rank for site in sites(longer)]


@pytest.mark.slow
def test_equivalent_faults_are_faults_of_the_source():
    for file in core.TESTS:
        source = (runner.ROOT / file).read_text("utf-8")
        changes = {core.change_of(file, site) for site in sites(source)}
        assert {key for key in core.EQUIVALENT if key[0] == file} <= changes


@pytest.mark.mutation
@pytest.mark.parametrize("file", core.TESTS)
def test_the_tests_pass_without_a_fault(file, tree):
    assert (output := runner.failure(tree, core.TESTS[file])) is None, output


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("file", "number"), [(file, i) for file in core.TESTS for i in range(core.SAMPLES)], ids=str
)
def test_the_fault_is_caught(file, number, tree):
    site = core.sample(file, core.SAMPLES)[number]
    assert not core.survives(tree, file, site), site
