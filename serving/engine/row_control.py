"""One controller for all rows of the engine, each with its own preset: gains and switches are `[rows]`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import Action, Signal
from entropic_jax.control import Chain, chain, pytree
from entropic_jax.control.presets import Gains, temperature
from entropic_jax.control.pruning import Pruning
from entropic_jax.control.scheduling import PRIOR, Moments, Predictor, new_predictor, observe

from .. import control_options
from ..control_options import Control
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
class Forecast:
    """Changes nothing; observes the entropy of every row, from which its priority follows."""

    def init(self, action: Action) -> Predictor:
        return new_predictor(action.temperature.shape[0])

    def update(self, signal: Signal, action: Action, state: Predictor) -> tuple[Action, Predictor]:
        return action, observe(state, signal.entropy, signal.emitting)


class Knobs(NamedTuple):
    """What the control of one sequence is, as the engine needs it."""

    gains: np.ndarray  # float32 [n], every gain and switch in the order of the controller's leaves
    pruning: bool  # pages may be left unread


class RowControl:
    """Turns the control that a job asks for into the numbers that the rows' common controller takes."""

    def __init__(self, law: str, calibration: Any, pruning: bool) -> None:
        """`law` of temperature is what the programs are compiled for; `pruning`, whether meso is allowed."""
        self.law, self.calibration, self.pruning = law, calibration, pruning
        self.knobs = functools.lru_cache(maxsize=1024)(self._knobs)

    @property
    def prior(self) -> Moments:
        """Of H₁ along a sequence, where nothing was observed."""
        c = self.calibration
        return PRIOR if c is None else Moments(c.mean, c.scale, c.correlation)

    def controller(self, rows: int) -> Chain:
        """The controller of all rows, every one of them switched off."""
        own = self._chain(False, temperature(Gains(law=self.law)), False, Pruning())
        return jax.tree.map(lambda x: jnp.full(rows, jnp.asarray(x)), own)

    def _knobs(self, control: Control) -> Knobs:
        """The numbers of one row. RequestError where the programs are not compiled for what is asked."""
        if control.preset == "paper":
            raise RequestError("preset is 'paper'; accepted by a server are off, micro, meso, macro and full")
        if control.method != "dense":
            raise RequestError(f"method is {control.method!r}; accepted by a server is dense")
        given = dict(control.gains)
        if given.get("law", self.law) != self.law:
            raise RequestError(f"law is {given['law']!r}; accepted by this server is {self.law}")
        laws = control_options.build(
            control._replace(gains=(*control.gains, ("law", self.law))), self.calibration, None
        ).controller.controllers
        prunes = [law for law in laws if isinstance(law, Pruning)]
        heats = [law for law in laws if not isinstance(law, Pruning)]
        if prunes and not self.pruning:
            raise RequestError(
                f"preset is {control.preset!r}; accepted by this server, which reads all pages, are off, "
                "micro and macro"
            )
        heat = heats[0] if heats else temperature(Gains(law=self.law))
        own = self._chain(bool(heats), heat, bool(prunes), prunes[0] if prunes else Pruning())
        return Knobs(np.array([float(x) for x in jax.tree.leaves(own)], np.float32), bool(prunes))

    @staticmethod
    def _chain(heated: bool, law: Any, pruned: bool, pruning: Pruning) -> Chain:
        return chain(Switched(heated, law), Switched(pruned, pruning), Forecast())


def turn_knobs(controller: Any, rows: jax.Array, gains: jax.Array) -> Any:
    """The controller with gains float32 `[k, n]` for rows int32 `[k]`; numbers past the last are ignored."""
    leaves, structure = jax.tree.flatten(controller)
    changed = [
        leaf.at[rows].set(gains[:, i].astype(leaf.dtype), mode="drop") for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, changed)


def gains_of(controller: Any) -> int:
    """How many gains and switches a row has."""
    return len(jax.tree.leaves(controller))
