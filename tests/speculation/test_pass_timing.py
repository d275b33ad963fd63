"""Pass costs: which passes are timed, and what their times are taken apart into."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from entropic_jax.speculation import measure_pass_costs
from entropic_jax.speculation import pass_timing as module
from entropic_jax.state.cache import allocate, grant
from entropic_jax.state.ledger import default_hardware
from tests import tiny

MODEL = tiny.model()


def costs_of(monkeypatch, seconds, model=MODEL, emitting=None, **options):
    """The costs, and the shapes that are timed, where `seconds(shape)` stands for running a pass.

    Passes and plain steps that emit take as long as passes of as many rows, unless `emitting` says more.
    """
    shapes = []

    def timed(launches, repeat):
        shapes.extend(launches)
        return list(map(seconds, launches))

    of_rows = lambda decoder, params, rows, length, *_, **__: (module.PassShape(rows, 1, length),) * 2
    monkeypatch.setattr(module, "PassProgram", lambda *_, **__: None)
    monkeypatch.setattr(module, "_launch_of", lambda program, shape: shape)
    monkeypatch.setattr(module, "emitting_launches", emitting or of_rows)
    monkeypatch.setattr(module, "least_seconds", timed)
    return measure_pass_costs(model.decoder, model.params, **options), shapes


def test_times_are_taken_apart_into_products_and_reading(monkeypatch):
    # 1 + 0.1 seconds a token, and for each position that a row reads 0.001 seconds and a tenth more a token.
    seconds = lambda s: 1 + 0.1 * s.rows * s.width + s.rows * s.length * (0.001 + 0.0001 * s.width)
    costs, shapes = costs_of(monkeypatch, seconds, most_tokens=64, context=1000)
    assert [shape.rows * shape.width for shape in shapes[:7]] == [1, 2, 4, 8, 16, 32, 64]
    assert costs.tokens == (1, 2, 4, 8, 16, 32, 64) and costs.widths == (1, 2, 4, 8, 16)
    assert costs.seconds == pytest.approx([1 + 0.1 * n for n in costs.tokens])
    assert costs.seconds_per_position == pytest.approx([0.001 + 0.0001 * n for n in costs.widths])
    assert costs.near_positions == 1000 and not costs.farther


def test_a_long_context_is_timed_beside_a_short_one(monkeypatch):
    seconds = lambda s: 1 + 0.1 * s.width + s.length * (0.001 if s.length <= module.NEAR else 0.004)
    costs, _ = costs_of(monkeypatch, seconds, most_tokens=4, context=4000)
    assert costs.near_positions == module.NEAR and costs.seconds_per_position == pytest.approx([0.001] * 3)
    ((positions, slopes),) = costs.farther
    assert positions == 4000 and slopes == pytest.approx([0.004] * 3)


def test_what_emission_takes_is_the_difference_to_a_pass_of_the_model(monkeypatch):
    launches = lambda decoder, params, rows, *_, **__: (1.4 * rows + 0.1, 1.2 * rows)
    seconds = lambda x: 1.0 * x.rows * x.width if isinstance(x, module.PassShape) else x
    costs, _ = costs_of(monkeypatch, seconds, emitting=launches, most_tokens=32, context=1000)
    assert costs.emission == pytest.approx((0.5, 0.4))
    assert costs.step_emission == pytest.approx((0.2, 0.2))


def test_a_batch_is_timed_where_its_passes_are_small_enough(monkeypatch):

    def seconds(shape):
        positions = shape.rows * shape.length
        of_position = 0.001 if positions <= 1000 else 0.003
        return 1 + 0.1 * shape.rows * shape.width + positions * (of_position + 0.0001 * shape.width)

    costs, _ = costs_of(monkeypatch, seconds, most_tokens=32, context=1000, batch=(8, 500))
    ((positions, slopes),) = costs.farther
    assert (costs.near_positions, positions) == (1000, 4000)
    # Passes of up to 4 tokens a row were timed; wider ones compute as much more as those of one row.
    expected = [0.003 + 0.0001 * n for n in costs.widths]
    assert slopes == pytest.approx(expected)


def test_a_position_of_memory_costs_no_less_than_one_of_the_caches(monkeypatch):
    seconds = lambda s: 1 + 0.1 * s.rows * s.width + (s.rows == 1) * s.length * 0.001
    costs, _ = costs_of(monkeypatch, seconds, most_tokens=4, context=1000, batch=(2, 1000))
    assert costs.farther[0][1] == pytest.approx(costs.seconds_per_position)


def test_a_disturbed_measurement_is_not_believed(monkeypatch):
    times = [1.0, 9.0, 3.0, 2.0, 7.0, 4.0]  # of 1, 2 and 4 tokens, at the short and at the long context
    measured = iter([*times, 1.5, 0.5, 1.25, 9.0])
    costs, _ = costs_of(monkeypatch, lambda _: next(measured), most_tokens=4, context=164)
    assert costs.seconds_per_position == pytest.approx((0.0, 0.0, 0.01))
    assert costs.seconds == pytest.approx((1.0, 3 - 0.64, 3 - 0.64))
    assert costs.emission == (0.5, 0.0) and costs.step_emission == pytest.approx((0.25, (9 - 3 - 0.25) / 3))


def test_of_a_large_model_small_passes_are_timed_and_larger_ones_follow_in_proportion(monkeypatch):
    peak = float(default_hardware().peak)
    shape = MODEL.decoder.shape._replace(weights=int(module.LONGEST_PASS * peak / 2 / 8))
    model = SimpleNamespace(decoder=SimpleNamespace(shape=shape), params=MODEL.params)
    seconds = lambda s: 0.5 + 0.1 * s.rows * s.width
    costs, shapes = costs_of(monkeypatch, seconds, model, most_tokens=256, context=1000, batch=(16, 500))
    # Of one row and 1 to 8 tokens, after a short and a long context, and of a batch with a token a row; what
    # emission adds is neglected.
    assert [s.rows * s.width for s in shapes] == [1, 2, 4, 8, 1, 2, 4, 8, 16]
    assert costs.tokens == (1, 2, 4, 8, 256) and costs.covers(256, (16, 500)) and costs.valid()
    assert costs.seconds[-1] == pytest.approx(32 * costs.seconds[-2])
    assert costs.emission == costs.step_emission == (0.0, 0.0)


def test_passes_that_differ_in_their_positions_share_a_program():
    shapes = module._shapes(32, 2000, None)
    programs = module._programs(MODEL.decoder, MODEL.params, shapes, 8, jnp.float32)
    assert sorted(programs) == [(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 16)]
    assert programs[1, 4]._shape.length == 2000 and programs[2, 16]._shape.length == module.SHORT


@pytest.mark.slow
def test_a_model_is_timed():
    costs = measure_pass_costs(MODEL.decoder, MODEL.params, most_tokens=4, context=100, repeat=3, page_size=8)
    assert costs.tokens == costs.widths == (1, 2, 4)
    # Which part of a time is the products' and which the positions' is noise at so short a context.
    assert min(*costs.seconds, *costs.seconds_per_position) >= 0
    assert costs.law(1, (1, 2, 4)).pass_costs(jnp.float32(100))[-1] > 0


def test_what_a_pass_reads_was_written(monkeypatch):
    """Memory that nothing was written to would be read out of the processor's cache."""

    def unwritten(*arguments, **sizes):
        pool = allocate(*arguments, **sizes)
        return pool._replace(layers=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool.layers))

    timed = []
    monkeypatch.setattr(module, "allocate", unwritten)
    monkeypatch.setattr(module, "grant", lambda cache, lengths: timed.append(cache) or grant(cache, lengths))
    module.PassProgram(MODEL.decoder, MODEL.params, None, module.PassShape(1, 1, 20), 8, jnp.float32)
    assert timed and all((leaf == 0).all() for leaf in jax.tree.leaves(timed[0].layers))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"most_tokens": 1}, "most_tokens must be at least 2; got 1"),
        ({"context": 64}, "context must be at least 65; got 64"),
        ({"repeat": 0}, "repeat must be at least 1; got 0"),
        (
            {"most_tokens": 4, "batch": (8, 4000)},
            "batch must have at most 4 rows and more than 2048 positions",
        ),
        ({"batch": (2, 1024)}, r"got \(2, 1024\)"),
    ],
)
def test_arguments_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        measure_pass_costs(MODEL.decoder, MODEL.params, **options)
