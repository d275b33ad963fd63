"""Row controllers: one controller for all rows of the engine, with gains and switches per row.

Every sequence has its own preset. The programs are compiled for all laws that any of them may need; a row's
switches say which of the laws apply to it, and its gains are values `[rows]`, so no request retraces.
"""

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import Action, Signal
from entropic_jax.control import Chain, PerRow, chain, pytree, update_rows
from entropic_jax.control.entropy_drop import AR1, PRIOR, EntropyPredictor, new_predictor, update_predictor
from entropic_jax.methods.presets import Gains, pruning_law, temperature_law
from entropic_jax.parameter_tables.control_gains import DRAFTS, MICRO, PRESETS, PRUNING, SCALES
from entropic_jax.parameter_tables.speculation_names import DRAFTERS, OFF
from entropic_jax.state.pytree import STATIC

from ..options import control_options
from ..options.control_options import SAMPLER_OPTIONS, SAMPLERS, Control
from ..request import RequestError


@pytree
class Switched:
    """A law for those rows only that are switched on; the others keep their action and state."""

    on: Any  # bool [rows]
    law: Any

    def init(self, action: Action) -> Any:
        return self.law.init(action)

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        on = jnp.broadcast_to(jnp.asarray(self.on), action.temperature.shape)
        return update_rows(self.law, signal._replace(emitting=signal.emitting & on), action, state)


@pytree
class Sampler:
    """A law that draws the tokens itself, with the same gains for all rows that are switched on."""

    on: Any  # bool [rows]
    law: Annotated[Any, STATIC]
    idle: Annotated[bool, STATIC] = False  # no row of the launch is on, so nothing is computed

    @property
    def observes(self) -> Any:
        """The attention statistics that the law needs."""
        return None if self.idle else getattr(self.law, "observes", None)

    def init(self, action: Action) -> Any:
        return self.law.init(action)

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        if self.idle:
            return action, state
        on = jnp.broadcast_to(jnp.asarray(self.on), action.temperature.shape)
        return update_rows(self.law, signal._replace(emitting=signal.emitting & on), action, state)


@pytree
class EntropyForecast:
    """Changes no action; observes the entropy of every row, from which its priority follows."""

    def init(self, action: Action) -> EntropyPredictor:
        return new_predictor(action.temperature.shape[0])

    def update(
        self, signal: Signal, action: Action, state: EntropyPredictor
    ) -> tuple[Action, EntropyPredictor]:
        return action, update_predictor(state, signal.entropy, signal.emitting)


@pytree
class RowController:
    """The laws of all rows, applied in the order of the fields."""

    temperature: Switched
    pruning: Switched
    method: Chain  # laws of the engine's method, for every row
    sampler: Sampler | None  # of an engine that has one
    forecast: EntropyForecast

    def for_launch(self, samples: bool) -> PerRow:
        """The laws of a launch; `samples`: the sampler draws the tokens of some rows.

        The state of `forecast` is the last of the states.
        """
        sampler = ()
        if self.sampler is not None:
            sampler = (dataclasses.replace(self.sampler, idle=not samples),)
        laws = (self.temperature, self.pruning, *self.method.controllers, *sampler, self.forecast)
        return PerRow(chain(*laws))


class RowGains(NamedTuple):
    """The control of one sequence, as the engine needs it."""

    values: np.ndarray  # float32 [n], gains and switches in the order of the controller's leaves
    pruning: bool  # pages may be left unread
    sampler: bool = False  # the engine's sampler draws its tokens
    branches: int = 0  # that it may have; 0: it does not search
    drafts: bool = False  # tokens are drafted for it, if the engine has a drafter


class RowControllers:
    """Translates the control that a request asks for into the gains of its row."""

    def __init__(
        self,
        law: str,
        calibration: Any,
        *,
        pruning: bool,
        entropic_schedule: bool,
        sampler: str | None = None,
        sampler_law: Any = None,
        method: str = "dense",
        method_laws: Chain | None = None,
        branches: int = 1,
        drafter: str = OFF,
        always_drafts: bool = False,
    ) -> None:
        """Takes the controllers that the engine's programs are compiled for.

        Args:
            law: name of the temperature law of the presets micro, full and full-lossy.
            calibration: the model's calibration, or None.
            pruning: whether pages may be left unread (presets meso-lossy and full-lossy).
            entropic_schedule: whether sequences are served in the order of π (preset macro).
            sampler: name of the engine's sampler, None without one.
            sampler_law: its law.
            method: name of the method that applies to all requests.
            method_laws: its laws.
            branches: largest number of branches of a sequence.
            drafter: name of the engine's drafter, or the directory of its draft model.
            always_drafts: whether tokens are drafted under every preset that reads all pages.
        """
        self.law, self.calibration, self.pruning = law, calibration, pruning
        self.entropic_schedule = entropic_schedule
        self.sampler, self.sampler_law = sampler, sampler_law
        self.method, self.method_laws = method, chain() if method_laws is None else method_laws
        self.branches, self.drafter, self.always_drafts = branches, drafter, always_drafts
        self.row_gains = functools.lru_cache(maxsize=1024)(self._row_gains)

    @property
    def prior(self) -> AR1:
        """Model of H₁ along a sequence before its first token."""
        c = self.calibration
        return PRIOR if c is None else AR1(c.mean, c.scale, c.correlation)

    @property
    def accepted(self) -> tuple[str, ...]:
        """The presets that a request may name."""
        refused = {"paper"}  # its schedule is for a loop of its own
        if not self.pruning:
            refused |= {name for name, scales in SCALES.items() if PRUNING in scales}
        if not self.entropic_schedule:
            refused.add("macro")
        if self.drafter == OFF:
            refused.add("meso")
        sampler = () if self.sampler is None else (self.sampler,)
        return (*(name for name in PRESETS if name not in refused), *sampler)

    def controller(self, rows: int) -> RowController:
        """The controller of all rows, every law switched off."""
        controller = self._controller(Gains(law=self.law))
        dtype = lambda x: jax.dtypes.canonicalize_dtype(np.result_type(x))
        return jax.tree.map(lambda x: jax.device_put(np.full(rows, x, dtype(x))), controller)

    def _row_gains(self, control: Control) -> RowGains:
        """The gains of one row. RequestError where the engine cannot do what is asked."""
        if control.preset not in self.accepted:
            raise RequestError(
                f"preset must be one of {', '.join(self.accepted)}; got {control.preset!r}"
                + self._refusal(control.preset),
                "preset",
            )
        if control.method not in ("dense", self.method):
            raise RequestError(f"method must be {self.method}; got {control.method!r}", "method")
        options = {name: value for name, value in control.gains if name not in SAMPLER_OPTIONS}
        if control.preset == self.sampler:
            control_options.check_sampler(control)
            self._drafts(control, prunes=True)
            return self._sampler_gains(dict(control.gains).get("branches", self.branches))
        if options.get("law", self.law) != self.law:
            raise RequestError(
                f"law must be {self.law}, the law of this engine; got {options['law']!r}", "law"
            )
        gains = control_options.gains(
            control._replace(gains=(*options.items(), ("law", self.law))), self.calibration
        )
        scales = SCALES[control.preset]
        prunes = PRUNING in scales
        controller = self._controller(gains, micro=MICRO in scales, prunes=prunes)
        return RowGains(
            _values(controller),
            pruning=prunes or bool(self.method_laws.controllers),
            drafts=self._drafts(control, prunes),
        )

    def _drafts(self, control: Control, prunes: bool) -> bool:
        """Whether tokens are drafted for a row. RequestError where they cannot be.

        Args:
            control: the control of the row.
            prunes: whether its preset leaves pages unread.
        """
        stated = control.speculate
        if stated is None:
            return not prunes and (self.always_drafts or DRAFTS in SCALES[control.preset])
        if stated not in (OFF, self.drafter):
            accepted = f"off or {self.drafter}" if self.drafter in DRAFTERS and self.drafter != OFF else "off"
            raise RequestError(f"speculate must be {accepted} in this engine; got {stated!r}", "speculate")
        if stated != OFF and prunes:
            reason = f"with preset {control.preset}, which leaves pages unread"
            raise RequestError(f"speculate must be off {reason}; got {stated!r}", "speculate")
        return stated != OFF

    def _sampler_gains(self, branches: int) -> RowGains:
        if not 1 <= branches <= self.branches:
            raise RequestError(f"branches must be between 1 and {self.branches}; got {branches}", "branches")
        return RowGains(
            _values(self._controller(Gains(law=self.law), sampled=True)),
            pruning=bool(self.method_laws.controllers),
            sampler=True,
            branches=branches if branches > 1 else 0,
        )

    def _refusal(self, preset: str) -> str:
        """Why a known preset is not accepted, and how to start a server that does; follows the message."""
        if preset in SAMPLERS:
            reason = "the engine does not have this sampler"
        elif PRUNING in SCALES.get(preset, ()) and not self.pruning:
            reason = "no request may leave pages unread in this engine"
        elif preset == "meso":
            reason = "the engine drafts no tokens"
        elif preset == "macro":
            reason = "the engine does not order requests by entropy"
        else:
            return ""
        return f" ({reason}; a server that is started with --preset {preset} accepts it)"

    def _controller(
        self, gains: Gains, micro: bool = False, prunes: bool = False, sampled: bool = False
    ) -> RowController:
        return RowController(
            temperature=Switched(micro, temperature_law(gains)),
            pruning=Switched(prunes, pruning_law(gains)),
            method=self.method_laws,
            sampler=None if self.sampler is None else Sampler(sampled, self.sampler_law),
            forecast=EntropyForecast(),
        )


def _values(controller: RowController) -> np.ndarray:
    return np.array([float(x) for x in jax.tree.leaves(controller)], np.float32)


def set_gains(controller: Any, rows: jax.Array, values: jax.Array) -> Any:
    """The controller with new gains and switches in some rows.

    Args:
        controller: leaves `[rows]`.
        rows: int32 `[k]`; numbers past the last row are ignored.
        values: float32 `[k, n]`, in the order of the leaves.
    """
    leaves, structure = jax.tree.flatten(controller)
    changed = [
        leaf.at[rows].set(values[:, i].astype(leaf.dtype), mode="drop") for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, changed)


def num_gains(controller: Any) -> int:
    """How many gains and switches a row has."""
    return len(jax.tree.leaves(controller))
