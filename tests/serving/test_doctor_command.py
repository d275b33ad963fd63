"""`entropic doctor`: its report on this machine, and the faults that it detects."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.pallas import self_test
from entropic_jax.pallas.dispatch import Operation
from entropic_jax.serving.cli import main
from entropic_jax.serving.commands import doctor


@pytest.fixture(autouse=True)
def automatic(monkeypatch):
    monkeypatch.delenv("ENTROPIC_KERNELS", raising=False)


@pytest.fixture(scope="module")
def checks():
    return self_test.checks()


@pytest.mark.slow
def test_a_sound_machine(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["devices"][0]["platform"] == "cpu"
    assert report["versions"]["jax"] == jax.__version__
    named = {operation["operation"]: operation for operation in report["operations"]}
    assert set(named) == {
        "paged_attention.decode",
        "paged_attention.prefill",
        "paged_attention.write",
        "paged_attention.select_pages",
        "topk_entropy",
        "topk_entropy.project",
        "skinny_matmul",
        "rms_norm",
        "silu_and_mul",
        "longest_match",
        "gumbel_argmax",
        "entropy_moments",
        "grouped_matmul",
    }
    for operation in named.values():
        assert operation["error"] <= operation["tolerance"]
        assert operation["compile_seconds"] > 0
    assert named["topk_entropy"]["declined"]["tpu"] == "the default device is a cpu"


@pytest.mark.slow
def test_what_is_said_to_a_person(monkeypatch, checks, capsys):
    monkeypatch.setattr(self_test, "checks", lambda: [checks[3]])
    monkeypatch.setenv("ENTROPIC_KERNELS", "xla")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "ENTROPIC_KERNELS=xla" in text
    assert "paged_attention.select_pages xla: compiled in" in text
    assert "all is well" in text


def without(result):
    """The result with its first number changed."""
    leaves, structure = jax.tree.flatten(result)
    leaves[0] = jnp.ravel(leaves[0]).at[0].add(1).reshape(leaves[0].shape)
    return structure.unflatten(leaves)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(6))
def test_a_kernel_that_is_wrong_is_found(place, monkeypatch, checks, capsys):
    check = checks[place]
    backends = check.operation.backends
    broken = Operation(check.operation.name, {"xla": lambda *x: without(backends["xla"](*x))})
    monkeypatch.setattr(self_test, "checks", lambda: [check._replace(operation=broken)])
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert f"problem: {check.operation.name}: differs by" in text
    assert "1 problems" in text


def declines(*arguments):
    raise NotImplementedError("not today")


def fails(*arguments):
    raise ValueError("out of\nmemory")


@pytest.mark.parametrize(
    ("backend", "said"), [(declines, "every back end declines"), (fails, "ValueError: out of")]
)
def test_what_cannot_run_is_said(backend, said, monkeypatch, checks, capsys):
    operation = Operation("topk_entropy", {"xla": backend})
    monkeypatch.setattr(self_test, "checks", lambda: [checks[4]._replace(operation=operation)])
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == [f"topk_entropy: {said}"]


def test_an_unknown_back_end_is_a_problem(monkeypatch, checks, capsys):
    monkeypatch.setenv("ENTROPIC_KERNELS", "cuda")
    monkeypatch.setattr(self_test, "checks", lambda: [checks[4]])
    assert main(["doctor"]) == 1
    assert "ENTROPIC_KERNELS must be one of xla, cpu, tpu, gpu" in capsys.readouterr().out


def test_no_device_is_a_problem(monkeypatch, capsys):
    def none():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(doctor, "devices", none)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == ["JAX finds no device: Unable to initialize backend 'tpu'"]


def test_differences():
    actual = (np.array([1.0, -np.inf]), np.array([1, 2]))
    assert self_test.difference(actual, actual) == 0
    for other in (
        (np.array([1.0, 0.0]), np.array([1, 2])),
        (np.array([np.nan, -np.inf]), np.array([1, 2])),
        (np.array([1.0, -np.inf]), np.array([1, 3])),
        (np.array([1.0]), np.array([1, 2])),
    ):
        assert self_test.difference(other, actual) == np.inf
    assert self_test.difference((np.array([1.5, -np.inf]), np.array([1, 2])), actual) == 0.5
