"""Extreme logits in the whole loop: every law continues, and a row without a distribution ends alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, generate, parameters, start
from entropic_jax.control.laws import LAWS
from entropic_jax.methods.presets import Gains, preset
from entropic_jax.state import FAILED, FULL
from tests import tiny

V = 96
INF = np.inf
ROWS: dict[str, np.ndarray] = {
    "one-hot": np.where(np.arange(V) == 5, 0.0, -INF),
    "uniform": np.zeros(V),
    "two are left": np.where(np.arange(V) < 2, 1.0, -INF),
    "far apart": np.where(np.arange(V) == 7, 1e30, -1e30),
    "far from zero": np.arange(V) * 0.01 + 1e6,
    "nan": np.where(np.arange(V) == 3, np.nan, 0.0),
    "all masked": np.full(V, -INF),
    "plus infinity": np.where(np.arange(V) == 3, INF, 0.0),
}
BROKEN = {"nan", "all masked", "plus infinity"}


@dataclasses.dataclass(frozen=True)
class TableDecoder:
    """A decoder whose logits are `params["table"]`, whatever its tokens."""

    inner: Any

    @property
    def shape(self) -> Any:
        return self.inner.shape

    def hidden(self, params: Any, *arguments: Any) -> Any:
        return self.inner.hidden(params["inner"], *arguments)

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        return params["table"]


def run(names: list[str], setting: Any) -> tuple[Any, Any]:
    m = tiny.model()
    table = jnp.asarray(np.stack([ROWS[name] for name in names]), jnp.float32)
    decoder, params = TableDecoder(m.decoder), {"inner": m.params, "table": table}
    state = start(
        decoder,
        params,
        setting.controller,
        allocate(decoder.shape, len(names), 64, page_size=4),
        tiny.prompts(*[30] * len(names)),
        key=jax.random.key(0),
        max_tokens=12,
        sample=parameters(len(names), temperature=1.0),
        page_policy=setting.page_policy,
    )
    state, trace = generate(decoder, params, setting.controller, state, 12, capacity=12)
    return jax.device_get(state), jax.device_get(trace)


SHORT = ("off", "full-lossy", "paper")
WAYS = {name: preset(name) for name in SHORT} | {
    f"micro, {law}": preset("micro", None, Gains(law=law))
    for law in LAWS
    if law not in ("normalised", "paper")
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in WAYS]
)
def test_extreme_logits_neither_stop_a_law_nor_spread(name):
    names = list(ROWS)
    state, trace = run(names, WAYS[name])
    status = dict(zip(names, state.status.tolist(), strict=True))
    assert status == {n: FAILED if n in BROKEN else FULL for n in names}
    sound = [i for i, n in enumerate(names) if n not in BROKEN]
    assert not trace.emitted[:, [i for i in range(len(names)) if i not in sound]].any()
    for field in (
        "entropy",
        "varentropy",
        "tempered_entropy",
        "surprisal",
        "temperature",
        "dropped_mass_limit",
        "cost",
    ):
        assert np.isfinite(getattr(trace, field)[:, sound]).all(), field
    tokens = {n: trace.token[:, i] for i, n in enumerate(names)}
    assert (tokens["one-hot"] == 5).all() and (tokens["far apart"] == 7).all()
    assert set(tokens["two are left"].tolist()) <= {0, 1}
    np.testing.assert_allclose(trace.entropy[0, :4], [0, np.log(V), np.log(2), 0], atol=1e-5)
    # The neighbours of a broken row emit what they emit next to a sound one.
    _, beside = run([n if n not in BROKEN else "uniform" for n in names], WAYS[name])
    np.testing.assert_array_equal(beside.token[:, sound], trace.token[:, sound])
