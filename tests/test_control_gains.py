"""Every interface covers every control gain of the table."""

import math
from pathlib import Path

import pydantic
import pytest

from entropic_jax.control.laws import LAWS
from entropic_jax.control.laws import SCHEDULES as SCHEDULING_LAWS
from entropic_jax.methods.presets import Gains, pruning_law
from entropic_jax.parameter_tables.control_gains import (
    CALIBRATED,
    GAINS,
    MACRO,
    ORDERED,
    SCHEDULES,
    TEMPERATURE_LAWS,
    ControlGains,
    check_order,
)
from entropic_jax.parameter_tables.table import AUTO, Number, ParameterError, markdown
from entropic_jax.serving.cli import parser
from entropic_jax.serving.http.protocol.entropic import Entropic
from entropic_jax.serving.options import control_options
from entropic_jax.serving.options.control_options import Control
from entropic_jax.serving.request import RequestError

DOCS = Path(__file__).resolve().parents[1] / "docs"
NUMBERS = {name: line for name, line in GAINS.items() if isinstance(line.accepts, Number)}


def test_the_names_in_the_table_are_those_of_the_laws():
    assert tuple(LAWS) == TEMPERATURE_LAWS
    assert tuple(SCHEDULING_LAWS) == SCHEDULES


def test_a_preset_has_each():
    assert set(Gains.__dataclass_fields__) == {*GAINS, "prior"}
    assert Gains().asdict() == {name: line.default for name, line in GAINS.items()}


@pytest.mark.parametrize("command", ["generate", "serve", "ablate"])
def test_the_command_line_has_an_option_for_each(command):
    needed = ["--text", "x"] if command == "ablate" else []
    options = parser().parse_args([command, *needed])
    scheduled_elsewhere = {"schedule"} if command == "serve" else set()  # by --scheduling-policy
    assert set(GAINS) - vars(options).keys() == scheduled_elsewhere
    assert control_options.read(options).gains == ()


def test_the_http_schema_states_each_with_its_range():
    properties = Entropic.model_json_schema()["properties"]
    assert {name for name, line in GAINS.items() if line.scope != MACRO} <= set(properties)
    for name, line in NUMBERS.items():
        stated = properties[name]["anyOf"][0]
        low = "exclusiveMinimum" if line.accepts.above_low else "minimum"
        high = "exclusiveMaximum" if line.accepts.below_high else "maximum"
        assert (stated[low], stated[high]) == (line.accepts.low, line.accepts.high)
        assert ({"const": AUTO, "type": "string"} in properties[name]["anyOf"]) == (name in CALIBRATED)


def test_a_body_brings_each_to_the_preset():
    values = {"law": "exact", "target_entropy": 2, "lowest_temperature": 0.5, "highest_temperature": 2.0}
    values |= {"dropped_mass_limit": 0.5, "lowest_dropped_mass_limit": 0.25}
    values |= {"low_entropy": 1.0, "high_entropy": 3.0}
    assert values.keys() == {name for name, line in GAINS.items() if line.scope != MACRO}
    control = Entropic.model_validate({"preset": "full-lossy", **values}).control(Control(), 1.0)
    assert control_options.gains(control, None).asdict() == {**values, "schedule": "entropic"}


def accepted(call, *errors: type[Exception]) -> bool:
    try:
        call()
    except errors:
        return False
    return True


@pytest.mark.parametrize("name", NUMBERS)
def test_every_interface_accepts_the_same_numbers(name, capsys):
    accepts = NUMBERS[name].accepts
    ends = [x + d for x in (accepts.low, accepts.high) for d in (-1e-3, 0, 1e-3)]
    for value in [*ends, math.nan, math.inf, "auto", "much"]:
        options = ["generate", f"--{name.replace('_', '-')}={value}"]
        verdicts = {
            "table": accepted(lambda: ControlGains(**{name: value}), ParameterError),
            "body": accepted(lambda: Entropic.model_validate({name: value}), pydantic.ValidationError),
            "options": accepted(lambda: parser().parse_args(options), SystemExit),
        }
        if value != "auto":
            verdicts["preset"] = accepted(lambda: Gains(**{name: value}), ParameterError)
        assert len(set(verdicts.values())) == 1, (value, verdicts)
    with pytest.raises(ParameterError, match=f"^{name} must be a number"):
        Gains(**{name: AUTO})
    capsys.readouterr()


@pytest.mark.parametrize(("low", "high"), ORDERED)
def test_an_order_that_is_wrong_is_put_down_to_what_was_stated(low, high):
    values = Gains().asdict()
    check_order(values, {})
    both = {low: 5.0, high: 4.0}
    alone = {low: 50.0} if values[high] else {low: 50.0, high: 49.0}  # 0 is the request's temperature
    for stated, param in ((both, low), (alone, low), ({high: 0.1}, high)):
        gains = {"lowest_dropped_mass_limit": 0.0, **stated}
        with pytest.raises(RequestError, match=f"^{param} must be (below|above) ") as error:
            control_options.gains(Control("full-lossy", tuple(gains.items())), None)
        assert error.value.param == param


@pytest.mark.parametrize(
    ("preset", "stated", "temperature"),
    [
        ("micro", {"lowest_temperature": 5}, 0.7),
        ("full", {"lowest_temperature": 0.8, "highest_temperature": 0}, 0.7),
    ],
)
def test_a_lowest_temperature_above_that_of_the_request_is_refused(preset, stated, temperature):
    """The request's temperature is T_max, so no law could obey both."""
    control = Control(preset, tuple(stated.items()))
    with pytest.raises(RequestError, match=r"^lowest_temperature must be at most .* 0\.7 while") as error:
        control_options.check_temperature(control, temperature)
    assert error.value.param == "lowest_temperature"


@pytest.mark.parametrize(
    ("preset", "stated", "temperature"),
    [
        ("micro", {"lowest_temperature": 0.7}, 0.7),
        ("micro", {"lowest_temperature": 5, "highest_temperature": 6}, 0.7),  # it heats
        ("micro", {"lowest_temperature": 5}, 0.0),  # greedy
        ("micro", {}, 0.1),  # the default is not stated: such a request keeps its temperature
        ("off", {}, 0.1),
    ],
)
def test_a_lowest_temperature_that_can_be_obeyed_is_accepted(preset, stated, temperature):
    control_options.check_temperature(Control(preset, tuple(stated.items())), temperature)


def test_the_lowest_limit_of_dropped_mass_is_at_most_the_limit():
    limits = lambda *stated: control_options.gains(Control("full-lossy", stated), None).asdict()
    lowest, limit = "lowest_dropped_mass_limit", "dropped_mass_limit"
    for stated, got in (
        (((lowest, 0.2), (limit, 0.1)), "= 0.1; got 0.2"),
        (((lowest, 0.012), (limit, 0.01)), "= 0.01; got 0.012"),
        (((lowest, 0.2),), "= 0.02; got 0.2"),
    ):
        with pytest.raises(RequestError, match=f"^{lowest} must be at most {limit} {got}$") as error:
            limits(*stated)
        assert error.value.param == lowest
    assert limits((lowest, 0.2), (limit, 0.2))[lowest] == 0.2
    with pytest.raises(ParameterError, match=f"^{lowest} must be at most {limit} = 0.02; got 0.2$"):
        pruning_law(Gains(lowest_dropped_mass_limit=0.2))


def test_without_a_lowest_limit_of_dropped_mass_the_limit_is_fixed():
    assert control_options.gains(Control("meso-lossy"), None).lowest_dropped_mass_limit is None
    for limit in (0.0, 0.001, 0.5):
        law = pruning_law(Gains(dropped_mass_limit=limit))
        assert (law.dropped_mass_limit, law.lowest_dropped_mass_limit) == (limit, limit)
    replaced = Gains(dropped_mass_limit=0.1).replace(dropped_mass_limit=0.3)
    assert pruning_law(replaced).lowest_dropped_mass_limit == 0.3


@pytest.mark.parametrize("name", ["low_entropy", "high_entropy"])
def test_entropies_that_a_fixed_limit_ignores_are_refused(name):
    control = Control("meso-lossy", ((name, 1.5),))
    with pytest.raises(RequestError, match=f"^{name} must be set with lowest_dropped_mass_limit, ") as error:
        control_options.gains(control, None)
    assert error.value.param == name
    limited = control._replace(gains=(*control.gains, ("lowest_dropped_mass_limit", 0.0)))
    assert getattr(control_options.gains(limited, None), name) == 1.5


def test_auto_needs_a_calibration():
    with pytest.raises(RequestError, match=r"without calibration\.json") as error:
        control_options.gains(Control("full-lossy", (("low_entropy", AUTO),)), None)
    assert error.value.param == "low_entropy"


def test_the_table_is_in_the_documentation():
    pages = [path.read_text("utf-8") for path in DOCS.rglob("*.md")]
    assert any(markdown(ControlGains) in page for page in pages)
