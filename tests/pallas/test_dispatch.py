"""Dispatch: which back end serves a call, how one is named, and what is logged."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.pallas import dispatch, paged_attention, topk_entropy
from entropic_jax.pallas.dispatch import Operation

OPERATIONS = (
    paged_attention.DECODE,
    paged_attention.PREFILL,
    paged_attention.WRITE,
    paged_attention.SELECT_PAGES,
    topk_entropy.TOPK_ENTROPY,
    topk_entropy.PROJECT,
)
LOGITS = np.random.default_rng(2).standard_normal((2, 300)).astype(np.float32)


def declines(x):
    raise NotImplementedError("not today")


@pytest.fixture
def add(monkeypatch):
    monkeypatch.delenv("ENTROPIC_KERNELS", raising=False)
    monkeypatch.setattr(dispatch, "_logged", set())
    backends = {
        "gpu": declines,
        "cpu": lambda x: jnp.add(x, 1),
        "xla": lambda x: jnp.add(x, 2),
        "interpret": lambda x: jnp.add(x, 3),
    }
    return Operation("add", backends)


def test_the_first_that_accepts_serves(add):
    assert add(1) == 2
    assert add.decline_reasons(1) == {"gpu": "not today", "cpu": None, "xla": None}


def test_the_one_that_is_named_serves(add, monkeypatch):
    monkeypatch.setenv("ENTROPIC_KERNELS", "xla")
    assert add(1) == 3
    assert add(1, backend="interpret") == 4  # an argument comes before the variable
    monkeypatch.setenv("ENTROPIC_KERNELS", "interpret")
    assert add.decline_reasons(1)["interpret"] is None
    monkeypatch.setenv("ENTROPIC_KERNELS", "tpu")  # which this operation has not
    assert add(1) == 2
    monkeypatch.setenv("ENTROPIC_KERNELS", "")
    assert add(1) == 2


def test_a_name_that_is_none_is_refused(add, monkeypatch):
    with pytest.raises(ValueError, match="backend of add must be one of gpu, cpu, xla, interpret; got 'tpu'"):
        add(1, backend="tpu")
    monkeypatch.setenv("ENTROPIC_KERNELS", "cuda")
    with pytest.raises(
        ValueError, match="ENTROPIC_KERNELS must be one of xla, cpu, tpu, gpu, interpret; got 'cuda'"
    ):
        add(1)


def test_if_all_decline_every_reason_is_given(add):
    with pytest.raises(ExceptionGroup, match="no back end supports add") as caught:
        add(1, backend="gpu")
    assert [str(e) for e in caught.value.exceptions] == ["gpu: not today"]
    both = Operation("both", {"tpu": declines, "gpu": declines})
    with pytest.raises(ExceptionGroup) as caught:
        both(1)
    assert [str(e) for e in caught.value.exceptions] == ["tpu: not today", "gpu: not today"]
    assert all(isinstance(e, NotImplementedError) for e in caught.value.exceptions)


def test_another_error_is_no_declining(add):
    with pytest.raises(TypeError):
        add("one")


def test_what_was_chosen_is_logged_once(add, caplog):
    with caplog.at_level(logging.DEBUG, "entropic_jax.kernels"):
        for _ in range(3):
            add(1)
    (record,) = caplog.records
    assert (record.levelno, record.message) == (
        logging.DEBUG,
        "add: cpu is chosen; declined: gpu: not today",
    )


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_operation_has_a_reference_and_the_kernels_decline_on_a_cpu(operation):
    assert "xla" in operation.backends
    assert set(operation.backends) <= set(dispatch.NAMES)
    for name in {"tpu", "gpu"} & set(operation.backends):
        with pytest.raises(NotImplementedError, match="the default device is a cpu"):
            operation.backends[name]()


@pytest.mark.slow
def test_the_interpreter_by_name(monkeypatch):
    expected = topk_entropy.topk_entropy(LOGITS, 3)
    actual = topk_entropy.topk_entropy(LOGITS, 3, backend="interpret")
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    monkeypatch.setenv("ENTROPIC_KERNELS", "interpret")
    with pytest.raises(ExceptionGroup, match="no back end supports topk_entropy") as caught:
        topk_entropy.topk_entropy(LOGITS, 129)
    assert [str(e) for e in caught.value.exceptions] == [
        "interpret: k must be at most 128 in a kernel; got 129"
    ]
    assert topk_entropy.topk_entropy(LOGITS, 129, backend="xla").values.shape == (2, 129)
