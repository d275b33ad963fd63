import math

import pytest

from entropic_jax.parameter_tables.table import Number, parameters_of
from entropic_jax.serving.request import Request, RequestError

NUMBERS = [line for line in parameters_of(Request) if isinstance(line.accepts, Number)]


def test_defaults_are_off():
    request = Request(prompt="x")
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (1.0, 0, 1.0, 0.0)
    assert (request.typical_p, request.repetition_penalty) == (1.0, 1.0)
    assert (request.stop, request.logit_bias) == ((), {})


@pytest.mark.parametrize("line", NUMBERS, ids=lambda line: line.name)
@pytest.mark.parametrize("value", ["1", None, True, math.nan, math.inf, -math.inf, [1]])
def test_no_number_is_refused(line, value):
    if value is None and line.accepts.optional:
        return
    with pytest.raises(RequestError, match=f"^{line.name} must be (a number|an integer) .*; got ") as error:
        Request(prompt="x", **{line.name: value})
    assert error.value.param == line.name


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("temperature", -0.1, "a number between 0 and 1000"),
        ("top_p", 0, "a number above 0 and at most 1"),
        ("top_p", 1.5, "a number above 0 and at most 1"),
        ("min_p", 2, "a number between 0 and 1"),
        ("top_k", 1.5, "an integer between -1 and 2147483647"),
        ("max_tokens", 0, "an integer between 1 and 2147483647"),
        ("seed", 2**63, "an integer between -9223372036854775808 and 9223372036854775807"),
        ("repetition_penalty", 0.0, "a number between 0.001 and 1000"),
    ],
)
def test_out_of_range_names_value_and_range(name, value, accepted):
    with pytest.raises(RequestError) as error:
        Request(prompt="x", **{name: value})
    assert str(error.value) == f"{name} must be {accepted}; got {value!r}"


def test_values_take_one_form():
    request = Request(
        prompt=[1, 2], stop="end", top_k=40.0, temperature=1, logit_bias={"7": -1, 8: -math.inf}
    )
    assert request.prompt == (1, 2)
    assert request.stop == ("end",)
    assert type(request.top_k) is int
    assert type(request.temperature) is float
    assert request.logit_bias == {7: -1.0, 8: -math.inf}


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": None},
        {"prompt": [-1]},
        {"prompt": [True]},
        {"prompt": ["a"]},
        {"stop": [""]},
        {"stop": [3]},
        {"stop": 3},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {-2: 1}},
        {"logit_bias": {2: math.inf}},
        {"logit_bias": [1]},
        {"ignore_eos": "yes"},
        {"include_stop_str_in_output": 1},
        {"min_tokens": -1},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": "ab"},
    ],
)
def test_wrong_kinds_are_named(wrong):
    (name,) = wrong
    with pytest.raises(RequestError, match=f"^{name} must be .*; got ") as error:
        Request(**{"prompt": "x", **wrong})
    assert error.value.param == name
