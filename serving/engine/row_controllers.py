"""One controller for all rows of the engine, each with its own preset: gains and switches are `[rows]`."""

import dataclasses
import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import Action, Signal
from entropic_jax.control import Chain, PerRow, chain, pytree, update_rows
from entropic_jax.control.controller import STATIC
from entropic_jax.control.entropy_drop import AR1, PRIOR, EntropyPredictor, new_predictor, update_predictor
from entropic_jax.control.presets import Gains, temperature_law
from entropic_jax.control.pruning import Pruning
from entropic_jax.control_gains import PRESETS

from .. import control_options
from ..control_options import SAMPLER_OPTIONS, SAMPLERS, Control
from ..request import RequestError


@pytree
class Switched:
    """A law for those rows only that are switched on; the others keep what they obey."""

    on: Any  # bool [rows]
    law: Any

    def init(self, action: Action) -> Any:
        return self.law.init(action)

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        changed, after = self.law.update(signal, action, state)
        on = jnp.broadcast_to(jnp.asarray(self.on), action.temperature.shape)
        return jax.tree.map(lambda new, old: jnp.where(on, new, old), changed, action), after


@pytree
class Sampler:
    """A law that draws the tokens itself, for those rows that are switched on; the same for all of them."""

    on: Any  # bool [rows]
    law: Annotated[Any, STATIC]
    used: Annotated[bool, STATIC] = True  # False in a launch in which no row asks for it: nothing is computed

    @property
    def observes(self) -> Any:
        """The attention that the law asks to be observed."""
        return getattr(self.law, "observes", None) if self.used else None

    def init(self, action: Action) -> Any:
        return self.law.init(action)

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        if not self.used:
            return action, state
        on = jnp.broadcast_to(jnp.asarray(self.on), action.temperature.shape)
        return update_rows(self.law, signal._replace(emitting=signal.emitting & on), action, state)


def for_launch(controller: PerRow, samples: bool) -> PerRow:
    """The controller of a launch; `samples`: its sampler draws for some of the rows."""

    def rest(law: Any) -> Any:
        return dataclasses.replace(law, used=samples) if hasattr(law, "used") else law

    return PerRow(chain(*map(rest, controller.controller.controllers)))


@pytree
class Forecast:
    """Changes nothing; observes the entropy of every row, from which its priority follows."""

    def init(self, action: Action) -> EntropyPredictor:
        return new_predictor(action.temperature.shape[0])

    def update(
        self, signal: Signal, action: Action, state: EntropyPredictor
    ) -> tuple[Action, EntropyPredictor]:
        return action, update_predictor(state, signal.entropy, signal.emitting)


class RowGains(NamedTuple):
    """What the control of one sequence is, as the engine needs it."""

    gains: np.ndarray  # float32 [n], every gain and switch in the order of the controller's leaves
    pruning: bool  # pages may be left unread
    sampler: bool = False  # its tokens are drawn by the engine's sampler
    branches: int = 0  # that it may have; 0: it does not search


class RowControllers:
    """Turns the control that a job asks for into the numbers that the rows' common controller takes."""

    def __init__(
        self,
        law: str,
        calibration: Any,
        pruning: bool,
        sampler: str | None = None,
        drawing: Any = None,
        method: str = "dense",
        always: tuple[Any, ...] = (),
        branches: int = 1,
    ) -> None:
        """What the programs are compiled for: a `law` of temperature, whether pages may be left unread.

        `sampler` is the name of the one whose law is `drawing`, None where there is none, of at most so
        many `branches`; `method` that of all jobs, with the laws that it has `always`.
        """
        self.branches = branches
        self.method, self.always = method, always
        self.law, self.calibration, self.pruning = law, calibration, pruning
        self.sampler, self.drawing = sampler, drawing
        self.row_gains = functools.lru_cache(maxsize=1024)(self._row_gains)

    @property
    def prior(self) -> AR1:
        """Of H₁ along a sequence, where nothing was observed."""
        c = self.calibration
        return PRIOR if c is None else AR1(c.mean, c.scale, c.correlation)

    def controller(self, rows: int) -> PerRow:
        """The controller of all rows, every one of them switched off."""
        own = self._chain(False, temperature_law(Gains(law=self.law)), False, Pruning(), False)
        return PerRow(jax.tree.map(lambda x: jnp.full(rows, jnp.asarray(x)), own))

    def _row_gains(self, control: Control) -> RowGains:
        """The numbers of one row. RequestError where the programs are not compiled for what is asked."""
        accepted = [name for name in PRESETS if name != "paper"] + ([self.sampler] if self.sampler else [])
        if control.preset not in accepted:
            raise RequestError(
                f"preset is {control.preset!r}; accepted by this server are {', '.join(accepted)}"
                + (" (it was not started with that --preset)" if control.preset in SAMPLERS else "")
            )
        if control.method not in ("dense", self.method):
            raise RequestError(f"method is {control.method!r}; accepted by this server is {self.method}")
        control = control._replace(method="dense", budgets=())  # what all jobs have need not be asked for
        given = {name: value for name, value in control.gains if name not in SAMPLER_OPTIONS}
        if control.preset == self.sampler:
            branches = dict(control.gains).get("branches", self.branches)
            if not 1 <= branches <= self.branches:
                raise RequestError(
                    f"branches is {branches}; accepted by this server are 1 to {self.branches}"
                )
            own = self._chain(False, temperature_law(Gains(law=self.law)), False, Pruning(), True)
            searches = branches if branches > 1 else 0
            return RowGains(_numbers(own), pruning=bool(self.always), sampler=True, branches=searches)
        if given.get("law", self.law) != self.law:
            raise RequestError(f"law is {given['law']!r}; accepted by this server is {self.law}")
        laws = control_options.build(
            control._replace(gains=(*given.items(), ("law", self.law))), self.calibration, None
        ).controller.controllers
        prunes = [law for law in laws if isinstance(law, Pruning)]
        heats = [law for law in laws if not isinstance(law, Pruning)]
        if prunes and not self.pruning:
            raise RequestError(
                f"preset is {control.preset!r}; accepted by this server, where no job may leave pages "
                "unread, are off, micro and macro"
            )
        heat = heats[0] if heats else temperature_law(Gains(law=self.law))
        own = self._chain(bool(heats), heat, bool(prunes), prunes[0] if prunes else Pruning(), False)
        return RowGains(_numbers(own), bool(prunes or self.always))

    def _chain(self, heated: bool, law: Any, pruned: bool, pruning: Pruning, drawn: bool) -> Chain:
        sampler = () if self.sampler is None else (Sampler(drawn, self.drawing),)
        return chain(Switched(heated, law), Switched(pruned, pruning), *self.always, *sampler, Forecast())


def _numbers(controller: Chain) -> np.ndarray:
    return np.array([float(x) for x in jax.tree.leaves(controller)], np.float32)


def set_gains(controller: Any, rows: jax.Array, gains: jax.Array) -> Any:
    """The controller with gains float32 `[k, n]` for rows int32 `[k]`; numbers past the last are ignored."""
    leaves, structure = jax.tree.flatten(controller)
    changed = [
        leaf.at[rows].set(gains[:, i].astype(leaf.dtype), mode="drop") for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, changed)


def num_gains(controller: Any) -> int:
    """How many gains and switches a row has."""
    return len(jax.tree.leaves(controller))
