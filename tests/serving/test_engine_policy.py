"""The scheduling policy of an engine, and the presets that it accepts in requests."""

import pytest

from entropic_jax.serving.control_options import Control
from entropic_jax.serving.engine.options import EngineOptions
from entropic_jax.serving.engine.row_controllers import RowControllers
from entropic_jax.serving.request import RequestError


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, "fcfs"),
        (dict(preset="micro"), "fcfs"),
        (dict(preset="meso"), "fcfs"),
        (dict(preset="entropix"), "fcfs"),
        (dict(preset="macro"), "entropic"),
        (dict(preset="full"), "entropic"),
        (dict(preset="full", scheduling_policy="fcfs"), "fcfs"),
        (dict(preset="off", scheduling_policy="entropic"), "entropic"),
    ],
)
def test_the_policy_follows_the_preset_unless_it_is_stated(options, policy):
    assert EngineOptions(**options).policy == policy


def test_a_policy_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="scheduling_policy must be one of None, entropic, fcfs; got 'lifo'"):
        EngineOptions(scheduling_policy="lifo")


def row_controllers(pruning: bool = True, entropic_schedule: bool = False) -> RowControllers:
    return RowControllers("normalised", None, pruning=pruning, entropic_schedule=entropic_schedule)


def test_macro_is_refused_where_nothing_would_be_done_for_it():
    with pytest.raises(
        RequestError, match=r"must be one of off, micro, meso, full; got 'macro' .*fcfs"
    ) as error:
        row_controllers().row_gains(Control("macro"))
    assert error.value.param == "preset"
    served = row_controllers(entropic_schedule=True)
    macro, off = (served.row_gains(Control(name)) for name in ("macro", "off"))
    assert macro.values.tolist() == off.values.tolist()  # the order is the engine's


def test_full_has_its_other_scales_under_every_policy():
    gains = [row_controllers(entropic_schedule=policy).row_gains(Control("full")) for policy in (False, True)]
    assert gains[0].pruning and gains[0].values.tolist() == gains[1].values.tolist()
    with pytest.raises(
        RequestError, match=r"got 'full' \(no request may leave pages unread in this engine\)"
    ):
        row_controllers(pruning=False).row_gains(Control("full"))
