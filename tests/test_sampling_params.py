"""Every interface covers every sampling parameter of the table and accepts the same values."""

import ast
import inspect
import math
import re
from pathlib import Path

import numpy as np
import pydantic
import pytest

from entropic_jax import SamplingParams, parameters
from entropic_jax.parameter_tables.sampling_params import (
    DEVICE_PARAMETERS,
    ENGINE,
    INSTEAD,
    OUTPUT,
    PARAMETERS,
)
from entropic_jax.parameter_tables.table import LARGEST_INT, Number, Parameter, ParameterError, markdown
from entropic_jax.serving.cli import parser
from entropic_jax.serving.engine import device_state
from entropic_jax.serving.http.protocol.chat import ChatBody
from entropic_jax.serving.http.protocol.completion import CompletionBody
from entropic_jax.serving.options import sampling_options
from entropic_jax.serving.request import Request
from entropic_jax.state import Sampling
from entropic_jax.state.sampling_parameters import defaults_unless

DOCS = Path(__file__).resolve().parents[1] / "docs"
CORE = Path(__file__).resolve().parents[1] / "entropic_jax"
BODIES = (
    (CompletionBody, {"prompt": "x"}),
    (ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
)
NUMBERS = {name: line for name, line in PARAMETERS.items() if isinstance(line.accepts, Number)}
HTTP_ONLY = {("max_tokens", 0)}  # computes a prompt alone, which other interfaces have no use for


def inner_ends(accepts: Number) -> tuple[float, float]:
    """The least and the greatest value of a range, or values near them where the ends are excluded."""
    step = 1 if accepts.kind is int else (accepts.high - accepts.low) / 1024
    return accepts.low + step * accepts.above_low, accepts.high - step * accepts.below_high


def other_than_default(line: Parameter) -> float:
    """An accepted value that differs from the default."""
    return next(end for end in reversed(inner_ends(line.accepts)) if end != line.default)


@pytest.mark.parametrize("above_low", [False, True])
@pytest.mark.parametrize("below_high", [False, True])
@pytest.mark.parametrize("kind", [int, float])
def test_the_ends_of_a_range_that_these_tests_use_are_accepted(kind, above_low, below_high):
    accepts = Number(kind, -1, 7, above_low, below_high)
    ends = inner_ends(accepts)
    assert [accepts.check("x", end) for end in ends] == [*ends] and ends[0] < ends[1]
    assert ((ends[0] == -1), (ends[1] == 7)) == (not above_low, not below_high)


def test_the_device_has_a_field_for_each_parameter_that_it_applies():
    assert set(Sampling._fields) == {*DEVICE_PARAMETERS, "bias_tokens", "bias_values"}


def test_parameters_makes_an_array_of_each():
    state = parameters(2)
    for name, line in DEVICE_PARAMETERS.items():
        array = np.asarray(getattr(state, name))
        assert array.dtype == (np.int32 if line.accepts.kind is int else np.float32)
        assert array.tolist() == [np.asarray(line.default, array.dtype)] * 2


def test_token_ids_may_be_integers_of_numpy():
    params = SamplingParams(stop_token_ids=[np.int64(3), 4], allowed_token_ids=list(np.arange(2)))
    assert (params.stop_token_ids, params.allowed_token_ids) == ((3, 4), (0, 1))
    assert {type(token) for token in (*params.stop_token_ids, *params.allowed_token_ids)} == {int}
    with pytest.raises(ParameterError, match=r"^stop_token_ids must be a list of up to 16 token ids; got"):
        SamplingParams(stop_token_ids=["3"])


def test_rows_that_ask_for_nothing_have_the_defaults():
    stated = {name: other_than_default(line) for name, line in DEVICE_PARAMETERS.items()}
    kept = defaults_unless(np.array([True, False]), parameters(2, logit_bias={3: 1.0}, **stated))
    for name, line in DEVICE_PARAMETERS.items():
        assert stated[name] != line.default
        np.testing.assert_allclose(getattr(kept, name), [stated[name], line.default], rtol=1e-6)
    assert kept.bias_tokens[:, 0].tolist() == [3, 3]


def test_a_parameter_is_applied_in_one_file():
    """As CONTRIBUTING says: declared in the table, a field of `Sampling`, and applied in one file."""
    folders = ("sampling", "state", "phases")
    texts = {
        path.relative_to(CORE).as_posix(): path.read_text("utf-8")
        for folder in folders
        for path in CORE.glob(f"{folder}/**/*.py")
    }
    for name in set(DEVICE_PARAMETERS) - {"temperature"}:  # which the controllers set
        used = {
            file
            for file, text in texts.items()
            if re.search(rf"\b((?!lax\b)\w+\.{name}\b|{name}=)", _code(text))
        }
        assert used in ({"sampling/processors.py"}, {"sampling/truncation.py"}), (name, used)


def _code(text: str) -> str:
    """The code of a module without comments and docstrings."""
    return ast.unparse(ast.parse(re.sub(r'""".*?"""', '""', text, flags=re.DOTALL)))


def test_the_engine_sends_each_to_the_device():
    assert {*device_state.FLOAT_PARAMS, *device_state.INT_PARAMS} == set(DEVICE_PARAMETERS)


def test_a_request_has_each():
    assert set(PARAMETERS) < set(Request.__dataclass_fields__)


def test_the_command_line_has_an_option_for_each():
    options = vars(parser().parse_args(["generate"]))
    assert {name for name, line in PARAMETERS.items() if line.scope not in (ENGINE, OUTPUT)} <= options.keys()


@pytest.mark.parametrize(("body", "needed"), BODIES, ids=["completions", "chat"])
def test_the_http_schema_states_each_with_its_range(body, needed):
    properties = body.model_json_schema()["properties"]
    assert set(PARAMETERS) <= set(properties)
    for name, line in NUMBERS.items():
        if name in ("max_tokens", "logprobs", "prompt_logprobs"):
            continue
        stated = properties[name]["anyOf"][0]
        low = "exclusiveMinimum" if line.accepts.above_low else "minimum"
        high = "exclusiveMaximum" if line.accepts.below_high else "maximum"
        assert (stated[low], stated[high]) == (line.accepts.low, line.accepts.high), name
        assert properties[name]["description"].startswith(line.help)


def test_a_body_brings_each_to_the_request():
    stated = {"temperature": 0.5, "top_k": -1, "logit_bias": {"3": 1}, "stop": "x", "ignore_eos": True}
    fields = CompletionBody.model_validate({"prompt": "x", **stated}).sampling({"top_p": 0.5, "min_p": 0.1})
    request = Request(prompt="x", **fields)
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0.5, 0, 0.5, 0.1)
    assert (request.logit_bias, request.stop, request.ignore_eos) == ({3: 1.0}, ("x",), True)


def edges(accepts: Number) -> list[float]:
    """The ends of a range, values just outside and inside, and values that are not numbers."""
    step = 1 if accepts.kind is int else 1e-3
    ends = [x + d for x in (accepts.low, accepts.high) for d in (-step, 0, step)]
    return [*ends, 0, -1, 0.5, math.nan, math.inf, -math.inf]


def accepted(call, *errors: type[Exception]) -> bool:
    try:
        call()
    except errors:
        return False
    return True


@pytest.mark.parametrize("name", NUMBERS)
def test_every_interface_accepts_the_same_numbers(name, capsys):
    line = NUMBERS[name]
    room = {"max_tokens": LARGEST_INT} if name == "min_tokens" else {}
    for value in edges(line.accepts):
        answer = accepted(lambda: SamplingParams(**{**room, name: value}), ParameterError)
        verdicts = {"request": accepted(lambda: Request(prompt="x", **{**room, name: value}), ParameterError)}
        if name in DEVICE_PARAMETERS:
            verdicts["arrays"] = accepted(lambda: parameters(2, **{name: value}), ParameterError)
        if line.scope != OUTPUT:
            option = f"--{name.replace('_', '-')}={value!r}"
            verdicts["options"] = accepted(lambda: parser().parse_args(["generate", option]), SystemExit)
        if line.scope != OUTPUT and (name, value) not in HTTP_ONLY:
            for body, needed in BODIES:
                verdicts[body.__name__] = accepted(
                    lambda: body.model_validate({**needed, name: value}), pydantic.ValidationError
                )
        assert set(verdicts.values()) == {answer}, (name, value, verdicts)
    capsys.readouterr()


def test_options_are_read_by_the_parameters_names():
    arguments = "--top-p=0.5 --stop-token-ids=3 --stop-token-ids=4 --min-tokens=2 --ignore-eos".split()
    values = sampling_options.read(parser().parse_args(["generate", *arguments]))
    assert values == {"top_p": 0.5, "stop_token_ids": [3, 4], "min_tokens": 2, "ignore_eos": True}


def test_an_error_has_the_parameters_name():
    with pytest.raises(ParameterError, match=re.escape("top_p must be a number above 0 and at most 1")) as e:
        SamplingParams(top_p=0)
    assert e.value.param == "top_p" and isinstance(e.value, ValueError)


def test_a_seed_of_minus_one_is_drawn_anew():
    """As in vLLM: -1 is no seed, in every interface."""
    assert SamplingParams(seed=-1).seed is None
    assert [SamplingParams(seed=seed).seed for seed in (-2, 2**31, 5)] == [2**31 - 2, 0, 5]
    assert "seed" not in sampling_options.read(parser().parse_args(["generate", "--seed=-1"]))
    assert len({Request(prompt="x", seed=-1).seed for _ in range(4)}) > 1
    assert len({Request.of("x", SamplingParams(seed=-1), seed=3).seed for _ in range(4)}) == 1
    for body, needed in BODIES:
        assert len({body(**needed, seed=-1).first_seed() for _ in range(4)}) > 1


def test_a_parameter_that_there_is_not_is_named_with_what_to_use():
    for name, message in (
        ("temprature", r"temprature; did you mean temperature\?"),
        ("best_of", "best_of; use n, and choose by cumulative_logprob"),
        ("zzz", "zzz; its parameters are max_tokens, temperature, "),
    ):
        with pytest.raises(TypeError, match=f"^SamplingParams has no parameter {message}"):
            SamplingParams(**{name: 1})
    assert list(inspect.signature(SamplingParams).parameters) == [*PARAMETERS, "structured_outputs"]
    assert not set(INSTEAD) & set(PARAMETERS)


def test_a_text_must_not_have_more_tokens_than_it_may():
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    message = "min_tokens must be at most max_tokens, 4; got 5"
    with pytest.raises(ParameterError, match=message) as error:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert error.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 10**5000) for name in PARAMETERS),
        *(("stop_token_ids", value) for value in ([10**5000], [True], [1.0])),
        *(
            ("logit_bias", value)
            for value in (
                {1: 10**400},
                {10**5000: 1},
                {math.inf: 1},
                {1.0: 1},
                {True: 1},
                {"1" * 6000: 1},
                {"1.0": 1},
                {"\u0661": 1},  # a decimal digit outside ASCII
                {1: "2"},
                {1: True},
                {1: math.nan},
                {1: math.inf},
                {1: 2, "1": 3},
            )
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_no_value_is_refused_by_name_however_large(name, value):
    with pytest.raises(ParameterError, match=f"^{name} must ") as error:
        SamplingParams(**{name: value})
    assert error.value.param == name


def test_token_ids_of_biases_are_integers_or_decimal_strings():
    biases = SamplingParams(logit_bias={"3": 1, np.int64(4): np.float32(2), 5: -math.inf}).logit_bias
    assert biases == {3: 1.0, 4: 2.0, 5: -math.inf}


def test_the_table_is_in_the_documentation():
    pages = [path.read_text("utf-8") for path in DOCS.rglob("*.md")]
    assert any(markdown(SamplingParams) in page for page in pages)


def test_a_request_of_params():
    params = SamplingParams(temperature=0.5, stop=["a"], seed=2**31 + 3)
    request = Request.of("x", params, seed=7)
    assert (request.temperature, request.stop, request.seed) == (0.5, ("a",), 3)
    assert Request.of("x", SamplingParams(), seed=7).seed == 7
