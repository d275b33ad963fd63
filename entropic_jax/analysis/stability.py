"""Stability of the closed loop: contraction, response to noise, invariants, waiting times and hysteresis.

Everything is measured on `loop.step` and `loop.replay` themselves. Two parts can be put into the loop to
isolate a claim: `HeldLogits` cuts the path from a token to the next logits, and `Disturbed` falsifies what
a controller sees.

Source: the claims are those of Kiruluta 2026, Entropic-Time Inference, arXiv 2603.03310 (Proposition 1, the
theorem of §7.4, Appendix A, §4). `docs/stability.md` says which of them hold, and under which conditions.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import loop
from ..control.controller import AnySignal, schedule_rows, update_rows
from ..state import RUNNING, Action, Measured, SchedulingSignal, Signal, State, Trace
from ..state.pytree import STATIC, pytree
from .statistics import Estimate, estimate

OTHER_SEED = 1_000_003  # added to the seeds of a repeated sweep
SWEPT = ("temperature", "tempered_entropy", "entropy", "dropped_mass_limit", "kept_fraction")


# Parts that isolate a claim.


@dataclasses.dataclass(frozen=True)
class HeldLogits:
    """A decoder whose logits are `params["logits"]` at every step, `[rows, vocabulary]`.

    Attention and KV cache are those of the decoder inside, with parameters `params["decoder"]`. A token no
    longer changes the logits, so the entropy depends on the temperature alone.
    """

    decoder: Any

    @property
    def shape(self) -> Any:
        """The sizes of the decoder whose logits are held."""
        return self.decoder.shape

    def hidden(self, params: Any, *arguments: Any) -> Any:
        """See `loop.Decoder`."""
        return self.decoder.hidden(params["decoder"], *arguments)

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """See `loop.Decoder`."""
        return params["logits"]


class DisturbedState(NamedTuple):
    """The state of `Disturbed`."""

    position: jax.Array  # int32 [rows], in the table of errors
    controller: Any  # of the controller inside


@pytree
class Disturbed:
    """A controller that sees wrong measurements; the rest of the loop is as it was.

    Row r reads entry (r + n) modulo the period at its n-th token. The errors are added to H₁ and H_T, or,
    with `replace`, stand in place of all measurements. Logits are not disturbed.

    Args:
        controller: the law that is examined.
        error: float32 `[period]`, nats; with `replace` any numbers, NaN and infinities among them.
        replace: whether the errors replace the measurements; static.
    """

    controller: Any
    error: Any
    replace: Annotated[bool, STATIC] = False

    def init(self, action: Action) -> DisturbedState:
        """See `Controller`."""
        rows = jnp.arange(action.temperature.shape[0], dtype=jnp.int32)
        return DisturbedState(rows, self.controller.init(action))

    def update(self, signal: Signal, action: Action, state: DisturbedState) -> tuple[Action, DisturbedState]:
        """See `Controller`."""
        signal = self._disturb(signal, state.position)
        action, after = update_rows(self.controller, signal, action, state.controller)
        return action, DisturbedState(state.position + 1, after)

    def schedule(
        self, signal: SchedulingSignal, action: Action, state: DisturbedState
    ) -> tuple[Action, DisturbedState]:
        """See `Controller`.

        Args:
            signal: the signal of all rows, after sampling; it gets the errors that `update` saw at the same
                token.
            action: in force.
            state: the state of this controller.
        """
        signal = self._disturb(signal, state.position - 1)
        action, after = schedule_rows(self.controller, signal, action, state.controller)
        return action, state._replace(controller=after)

    def _disturb(self, signal: AnySignal, position: jax.Array) -> Any:
        table = jnp.asarray(self.error, jnp.float32)
        error = table[position % table.shape[0]]
        if self.replace:
            fields: dict[str, Any] = dict.fromkeys(Measured._fields, error)
            return signal._replace(**fields)
        return signal._replace(
            entropy=signal.entropy + error, tempered_entropy=signal.tempered_entropy + error
        )


# Contraction of the temperature law (Proposition 1).


class Sensitivity(NamedTuple):
    """How a replay's temperatures depend on the first one; each `[steps, rows]`."""

    temperature: jax.Array  # T[t], after the controller acted
    slope: jax.Array  # ∂ ln T[t] / ∂ ln T[start]


def _log_temperatures(
    decoder: Any, params: Any, law: Any, state: State, tokens: jax.Array, log_start: jax.Array
) -> jax.Array:
    action = state.action._replace(temperature=jnp.exp(log_start))
    begun = state._replace(action=action, control=law.init(action))
    return jnp.log(loop.replay(decoder, params, law, begun, tokens)[1].temperature)


def temperature_sensitivity(
    decoder: Any, params: Any, law: Any, state: State, tokens: jax.Array, width: float | None = None
) -> Sensitivity:
    """How the temperatures of a replay depend on the temperature at its start.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        law: the temperature law.
        state: the state of the loop; `state.action.temperature` is the start, above 0 in every row.
        tokens: int32 `[rows, steps]`, the tokens to replay.
        width: the width of the central difference quotient in ln T; None differentiates in forward mode.

    >>> contraction_rates(Sensitivity(jnp.ones((3, 1)), jnp.array([[0.5], [0.25], [0.0]])))[:, 0].tolist()
    [0.5, 0.5, 0.0]
    """
    at = partial(_log_temperatures, decoder, params, law, state, tokens)
    start = jnp.log(state.action.temperature)
    if width is None:
        value, slope = jax.jvp(at, (start,), (jnp.ones_like(start),))
    else:
        value, slope = at(start), (at(start + width) - at(start - width)) / (2 * width)
    return Sensitivity(jnp.exp(value), slope)


def contraction_rates(sensitivity: Sensitivity) -> np.ndarray:
    """The factor by which each step multiplies a small distance in ln T, `[steps, rows]`; 0 after a 0.

    Below 1 in absolute value the step contracts. A negative factor overshoots.
    """
    slope = np.asarray(sensitivity.slope, float)
    before = np.concatenate([np.ones_like(slope[:1]), slope[:-1]])
    return np.divide(slope, before, out=np.zeros_like(slope), where=before != 0)


# Invariants of the coupled loop (the theorem of §7.4) and waiting times.


class Orbit(NamedTuple):
    """A run of the loop, step by step; each `[steps, rows]`."""

    trace: Trace
    action: Action  # in force after the step
    running: jax.Array  # bool: after the step the row could advance
    length: jax.Array  # int32, positions that the step could read


@partial(jax.jit, static_argnames=("decoder", "steps"))
def record_orbit(decoder: Any, params: Any, controller: Any, state: State, steps: int) -> tuple[State, Orbit]:
    """Runs the loop and keeps every step, also of rows that wait or find no page.

    Args:
        decoder: the model's pure functions. Static.
        params: its parameters.
        controller: the control law.
        state: the state of the loop, started with this law or one of the same structure.
        steps: static.
    """

    def body(before: State, _: None) -> tuple[State, Orbit]:
        state, trace = loop.step(decoder, params, controller, before)
        return state, Orbit(trace, state.action, state.status == RUNNING, before.length + 1)

    return jax.lax.scan(body, state, length=steps)


class Limits(NamedTuple):
    """The invariant set of the coupled loop."""

    lowest_temperature: float  # T_min
    highest_temperature: float  # T_max
    dropped_mass_limit: float  # ε_max
    rate: float  # largest increase of ε in a step
    min_positions: int  # positions that a step reads of a row at least, if the row has as many
    longest_wait: float  # steps between two selections of a row


def violations(orbit: Orbit, limits: Limits) -> dict[str, int]:
    """How often a run left the invariant set, by condition: pairs of a step and a row, and rows for the wait.

    A value that is not finite counts as a violation.
    """
    trace, action = orbit.trace, jax.tree.map(np.asarray, orbit.action)
    temperature, epsilon = action.temperature, action.dropped_mass_limit
    inside = (temperature >= np.float32(limits.lowest_temperature) * (1 - 1e-6)) & (
        temperature <= np.float32(limits.highest_temperature) * (1 + 1e-6)
    )
    budget = (epsilon >= 0) & (epsilon <= np.float32(limits.dropped_mass_limit))
    slow = np.diff(epsilon, axis=0) <= limits.rate + 1e-6
    length = np.asarray(orbit.length)
    positions = np.asarray(trace.kept_fraction) * length
    enough = positions >= np.minimum(length, limits.min_positions) - 1e-2
    waits = longest_run(np.asarray(orbit.running) & (action.quota == 0))
    return {
        "temperature": int((~inside).sum()),
        "dropped_mass_limit": int((~budget).sum()),
        "rate": int((~slow).sum()),
        "pages": int((~enough & np.asarray(trace.emitted)).sum()),
        "wait": int((waits > limits.longest_wait).sum()),
    }


def longest_run(flags: np.ndarray) -> np.ndarray:
    """The longest run of consecutive true entries in each column, `[columns]`.

    >>> longest_run(np.array([[True, False], [True, True], [False, True], [True, True]])).tolist()
    [2, 3]
    """
    longest = run = np.zeros(flags.shape[1], int)
    for flag in flags:
        run = np.where(flag, run + 1, 0)
        longest = np.maximum(longest, run)
    return longest


def waiting_bound(law: Any, rows: int) -> float:
    """B/a + ⌈n/c⌉, the longest wait in steps until a row is selected again.

    Args:
        law: a `control.scheduling.Scheduling`.
        rows: n, sequences that compete.

    >>> from entropic_jax.control.scheduling import Scheduling
    >>> waiting_bound(Scheduling(width=2, bound=4.0, ageing=0.5), 6)
    11.0
    """
    return float(law.bound) / float(law.ageing) + -(-rows // law.width)


# Fixed points and hysteresis (§4).


@partial(jax.jit, static_argnames=("decoder", "steps"))
def _dwell(
    decoder: Any, params: Any, controller: Any, state: State, steps: int
) -> tuple[State, dict[str, jax.Array]]:
    """Runs `steps` steps; the mean of each field of `SWEPT` over the second half, `[rows]`."""
    state, orbit = record_orbit(decoder, params, controller, state, steps)
    emitted = orbit.trace.emitted & (jnp.arange(steps) >= steps // 2)[:, None]
    tokens = jnp.maximum(emitted.sum(0), 1).astype(jnp.float32)
    mean = lambda x: jnp.where(emitted, x, 0.0).sum(0) / tokens
    return state, {name: mean(getattr(orbit.trace, name)) for name in SWEPT}


def sweep(
    decoder: Any, params: Any, controllers: Sequence[Any], state: State, steps: int
) -> tuple[State, dict[str, np.ndarray]]:
    """Runs one generation under a series of controllers, each for `steps` steps.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        controllers: controllers of one structure; each takes over the state of the one before.
        state: the state of the loop, with room for all tokens.
        steps: number of steps of each controller.

    Returns:
        The state, and the state that each controller reached: the mean of each field of `SWEPT` over the
        second half of its steps, `[controllers, rows]`.
    """
    reached = []
    for controller in controllers:
        state, means = _dwell(decoder, params, controller, state, steps)
        reached.append(jax.device_get(means))
    return state, {name: np.stack([means[name] for means in reached]) for name in SWEPT}


class Hysteresis(NamedTuple):
    """The states that four sweeps reached, by field of `SWEPT`; each `[levels, rows]`, in ascending order."""

    up: Mapping[str, np.ndarray]
    down: Mapping[str, np.ndarray]  # continues `up`, in the opposite direction
    again: Mapping[str, np.ndarray]  # continues `up`, from the lowest level up: the control of the direction
    repeated: Mapping[str, np.ndarray]  # begins as `up` did, with other random bits: the noise floor


def measure_hysteresis(
    decoder: Any, params: Any, controllers: Sequence[Any], state: State, steps: int
) -> Hysteresis:
    """Sweeps a gain up and then down, with two controls.

    Without memory, `down` and `again` reach the same state at each level. Where they agree with each other
    but not with `up`, the loop has changed for good, or the longer text acts.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        controllers: one per level, in ascending order of the gain that is swept.
        state: the state of the loop, with room for two sweeps. Its rows are the independent repetitions.
        steps: number of steps of each level.
    """
    series = partial(sweep, decoder, params)
    middle, up = series(controllers, state, steps)
    _, down = series(controllers[::-1], middle, steps)
    _, again = series(controllers, middle, steps)
    _, repeated = series(controllers, state._replace(seed=state.seed + OTHER_SEED), steps)
    return Hysteresis(up, {name: reached[::-1] for name, reached in down.items()}, again, repeated)


class Gap(NamedTuple):
    """Differences between two sweeps, mean over levels; estimates over rows."""

    hysteresis: Estimate  # down − up
    control: Estimate  # again − up
    noise: Estimate  # repeated − up
    direction: Estimate  # down − again: sweeps that differ in their direction alone


def branch_gap(measured: Hysteresis, field: str) -> Gap:
    """The gap between the branches of a sweep, beside those of the controls.

    Args:
        measured: by `measure_hysteresis`.
        field: one of `SWEPT`.
    """
    reached = {name: sweep[field] for name, sweep in measured._asdict().items()}
    pairs = (("down", "up"), ("again", "up"), ("repeated", "up"), ("down", "again"))
    return Gap(*(estimate((reached[second] - reached[first]).mean(0)) for second, first in pairs))
