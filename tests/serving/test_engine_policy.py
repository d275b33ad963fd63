"""The scheduling policy of an engine, and the presets that it accepts in requests."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from entropic_jax.control import chain
from entropic_jax.control.entropy_drop import PRIOR
from entropic_jax.control.pruning import FixedPruning
from entropic_jax.serving.engine.assembly import log_order
from entropic_jax.serving.engine.draft_choice import LONGEST_WAIT
from entropic_jax.serving.engine.grammars import Plan
from entropic_jax.serving.engine.launch_costs import LaunchCosts, MeasuredLaunch
from entropic_jax.serving.engine.launch_planner import LaunchPlanner
from entropic_jax.serving.engine.options import EngineOptions
from entropic_jax.serving.engine.priority import Ranking
from entropic_jax.serving.engine.program_shapes import DecodeProgram
from entropic_jax.serving.engine.row_controllers import RowControllers
from entropic_jax.serving.options.control_options import SAMPLERS, Control
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
        (dict(preset="full-lossy"), "entropic"),
        (dict(preset="full", scheduling_policy="fcfs"), "fcfs"),
        (dict(preset="off", scheduling_policy="entropic"), "entropic"),
    ],
)
def test_the_policy_follows_the_preset_unless_it_is_stated(options, policy):
    assert EngineOptions(**options).policy == policy


@pytest.mark.parametrize("preset", ["off", "meso", "full", "full-lossy", "entropix"])
@pytest.mark.parametrize("policy", [None, "entropic", "predicted", "fcfs", "priority"])
def test_a_preset_whose_order_is_not_that_of_the_engine_is_logged(preset, policy, caplog):
    with caplog.at_level("INFO"):
        log_order(EngineOptions(preset=preset, scheduling_policy=policy))
    without = "full" in preset and policy in ("predicted", "fcfs", "priority")
    message = f"preset {preset} runs without macro: scheduling_policy is {policy}"
    assert caplog.messages == [message] * without


def test_a_policy_that_is_not_known_is_refused():
    names = "None, entropic, predicted, fcfs, priority"
    with pytest.raises(ValueError, match=f"scheduling_policy must be one of {names}; got 'lifo'"):
        EngineOptions(scheduling_policy="lifo")


def row_controllers(pruning: bool = True, entropic_schedule: bool = False) -> RowControllers:
    return RowControllers("normalised", None, pruning=pruning, entropic_schedule=entropic_schedule)


def test_macro_is_refused_where_nothing_would_be_done_for_it():
    with pytest.raises(
        RequestError,
        match=r"must be one of off, micro, full, meso-lossy, full-lossy; got 'macro' \(the engine does not",
    ) as error:
        row_controllers().row_gains(Control("macro"))
    assert error.value.param == "preset"
    served = row_controllers(entropic_schedule=True)
    macro, off = (served.row_gains(Control(name)) for name in ("macro", "off"))
    assert macro.values.tolist() == off.values.tolist()  # the order is the engine's


def test_full_lossy_has_its_other_scales_under_every_policy():
    gains = [
        row_controllers(entropic_schedule=policy).row_gains(Control("full-lossy")) for policy in (False, True)
    ]
    assert gains[0].pruning and gains[0].values.tolist() == gains[1].values.tolist()


@pytest.mark.parametrize(
    ("preset", "reason"),
    [
        ("full-lossy", "no request may leave pages unread in this engine"),
        ("meso", "the engine drafts no tokens"),
        ("macro", "the engine does not order requests by entropy"),
        ("dslider", "the engine does not have this sampler"),
    ],
)
def test_a_refused_preset_says_how_to_start_a_server_that_accepts_it(preset, reason):
    with pytest.raises(RequestError) as error:
        row_controllers(pruning=False).row_gains(Control(preset))
    said = f"({reason}; a server that is started with --preset {preset} accepts it)"
    assert str(error.value).endswith(f"; got {preset!r} {said}")
    options = EngineOptions(preset=preset)  # and such an engine does
    started = RowControllers(
        options.law,
        None,
        pruning=options.prunes,
        entropic_schedule=options.policy == "entropic",
        sampler=preset if preset in SAMPLERS else None,
        drafter=options.drafter,
    )
    assert preset in started.accepted


def test_the_prior_of_entropy_is_that_of_the_calibration():
    assert row_controllers().prior == PRIOR
    calibration = SimpleNamespace(mean=1.5, scale=0.7, correlation=0.25)
    subject = RowControllers("normalised", calibration, pruning=True, entropic_schedule=False)
    assert subject.prior._asdict() == vars(calibration)


def test_a_row_may_leave_pages_unread_by_its_preset_or_by_the_method_of_the_engine():
    lossy, off = Control("meso-lossy"), Control("off")
    plain = row_controllers()
    assert plain.row_gains(lossy).pruning and not plain.row_gains(off).pruning
    laws = chain(FixedPruning(0.1))
    quest = RowControllers("normalised", None, pruning=True, entropic_schedule=False, method_laws=laws)
    assert quest.row_gains(off).pruning


@pytest.mark.parametrize("always", [True, False])
def test_nothing_is_drafted_for_a_row_that_leaves_pages_unread(always):
    subject = RowControllers(
        "normalised", None, pruning=True, entropic_schedule=False, drafter="suffix", always_drafts=always
    )
    drafts = {name: subject.row_gains(Control(name)).drafts for name in ("off", "meso", "full-lossy")}
    assert drafts == {"off": always, "meso": True, "full-lossy": False}


def test_no_launch_drafts_beside_a_row_that_leaves_pages_unread_or_where_it_teaches_nothing():
    planner = LaunchPlanner.__new__(LaunchPlanner)
    shapes = SimpleNamespace(
        speculates=True, drafting_widths=(4,), widths=(4,), page_policies=(None, "pruned"), samplers=(False,)
    )
    planner.sizes = SimpleNamespace(shapes=shapes)
    memory = SimpleNamespace(is_out=lambda key: False, misses=lambda key: False)
    planner.programs = SimpleNamespace(available=lambda key: True, memory=memory)
    planner.draft_choice = SimpleNamespace(drafts=lambda width, untried, recorded: recorded)

    def row(pruning: bool = False, drafts: bool = True) -> SimpleNamespace:
        gains = SimpleNamespace(pruning=pruning, drafts=drafts, sampler=False)
        return SimpleNamespace(row_gains=gains, num_scheduled=5, num_replay_tokens=0)

    def drafts(*rows: SimpleNamespace, beside_chunk: bool = False) -> bool:
        return planner.speculates(list(rows), {}, beside_chunk=beside_chunk)

    assert drafts(row(), row(drafts=False))
    assert not drafts(row(), row(pruning=True, drafts=False))
    assert not drafts(row(drafts=False))
    assert not drafts(row(), beside_chunk=True)


def test_a_launch_drafts_for_grammars_where_their_plans_expect_tokens():
    planner = LaunchPlanner.__new__(LaunchPlanner)
    planner.sizes = SimpleNamespace(shapes=SimpleNamespace(capacity=16))
    planner.costs, planner._planned_plain = LaunchCosts(), 0
    sequence = SimpleNamespace(row=0, generated=[1, 2, 3], num_accepted=0, num_drafted=0)
    mask = np.full(1, -1, np.int32)
    nothing, much = Plan([mask], []), Plan([mask] * 7, [1] * 6)
    assert planner._drafts_pay([sequence], {0: much}, 1, beside_chunk=False)
    # A tie, however many launches ago the last pass was.
    assert not any(
        planner._drafts_pay([sequence], {0: nothing}, 1, beside_chunk=False) for _ in range(3 * LONGEST_WAIT)
    )
    slow = MeasuredLaunch(steps=1, seconds=0.1, tokens=1.0, drafts=6.0, idle=0.0)
    for speculates, launch in ((False, slow._replace(seconds=0.001, drafts=0.0)), (True, slow)):
        for _ in range(2):  # the first may have waited for its program
            planner.costs.record(DecodeProgram(1, None, False, speculates), launch, None)
    planner._planned_plain = 0
    tried = [
        planner._drafts_pay([sequence], {0: much}, 1, beside_chunk=False) for _ in range(LONGEST_WAIT + 2)
    ]
    assert tried == [False] * LONGEST_WAIT + [True, False]


@pytest.mark.parametrize(
    ("running", "seconds_of_row", "steps"), [(8, 0.001, 2), (50, 0.001, 5), (50, 0.0, 2)]
)
def test_with_free_rows_a_launch_lasts_as_long_as_its_texts_need_to_be_delivered(
    running, seconds_of_row, steps
):
    planner = LaunchPlanner.__new__(LaunchPlanner)
    planner.sizes = SimpleNamespace(rows=64, shapes=SimpleNamespace(capacity=64, plan=None))
    planner.seconds_of_row = seconds_of_row
    planner.costs = SimpleNamespace(step_seconds=lambda width, speculates: 0.0099)
    planner.draft_choice = SimpleNamespace(begins_try=lambda width, speculates: False)
    planner.decode_program = lambda running, speculates: DecodeProgram(64, None, False, speculates)
    rows = [SimpleNamespace(num_scheduled=1)] * running
    number = partial(planner.num_steps, rows, 99, waiting=False, speculates=False, plans={})
    assert number(prefilling=0) == steps
    assert number(prefilling=1) == 1, "a prompt does not wait for texts"


def test_a_row_with_one_branch_does_not_search():
    subject = RowControllers(
        "normalised", None, pruning=True, entropic_schedule=False, sampler="entropix", branches=4
    )
    gains = lambda **values: subject.row_gains(Control("entropix", tuple(values.items())))
    assert [gains(branches=n).branches for n in (1, 2, 4)] == [0, 2, 4] and gains().branches == 4
    assert gains(branches=1).sampler and not subject.row_gains(Control("off")).sampler


def waiting(max_tokens: int, arrival_time: float) -> SimpleNamespace:
    return SimpleNamespace(
        remaining_work=float(max_tokens),
        max_length=max_tokens + 10,
        row=-1,
        arrival_time=arrival_time,
        engine_request=SimpleNamespace(priority=0),
        slack=lambda timestamp: 1.0,
        rounds_waited=lambda rounds: 0.0,
    )


def test_the_order_of_admission_follows_stated_lengths_and_no_entropy():
    """What the schedule gains under load is credited to the lengths that clients state."""
    limits = [40, 10, 160, 80]
    orders = []
    for drops in (np.zeros(4), np.array([3.0, 0.0, 2.0, 1.0])):
        ranking = Ranking("entropic", PRIOR)
        sequences = [waiting(limit, time) for time, limit in enumerate(limits)]
        orders.append([s.remaining_work for s in ranking.rank(sequences, 0.0, drops)])
    assert orders == [sorted(map(float, limits))] * 2
