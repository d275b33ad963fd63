"""Samples on meshes of virtual devices, in a process of its own: prints what the tests compare.

    python -m tests.row_shard_programs NAME...

JAX fixes the number of devices when it starts, so the caller sets XLA_FLAGS.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import allocate, chain, loop, models, parameters, start
from entropic_jax.analysis.collectives import collectives
from entropic_jax.attention.page_selection import Selection
from entropic_jax.control import Every, PerRow, pytree
from entropic_jax.control.scheduling import Scheduling
from entropic_jax.control.temperature import Integral, Mirostat
from entropic_jax.mesh import make_mesh, sharding
from entropic_jax.methods import presets
from entropic_jax.pallas.paged_attention import SelectionRules
from entropic_jax.phases.prefill import PrefillChunk
from entropic_jax.speculation.draft_length import draft_length
from entropic_jax.speculation.pruned import pruned_drafter
from entropic_jax.speculation.speculator import speculator
from entropic_jax.state.constraints import mask_words, no_constraints
from entropic_jax.state.row_subset import Shared
from tests import tiny

SIZES: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
)
VOCABULARY = 96
ROWS, STEPS, DRAFTED = 6, 12, 3  # four devices have two rows each, of which the last two are no rows
LENGTHS = (40, 57, 9, 90, 70, 3)
# A row that is greedy, and others with every parameter of the sampler, so that no two devices compute alike.
SAMPLED: dict[str, Any] = dict(
    temperature=[0.0, 1.0, 1.2, 0.9, 1.0, 1.1],
    top_k=[0, 20, 0, 0, 0, 0],
    top_p=[1.0, 0.9, 1.0, 1.0, 1.0, 0.95],
    min_p=[0.0, 0.0, 0.02, 0.0, 0.0, 0.0],
    typical_p=[1.0, 1.0, 1.0, 0.9, 1.0, 1.0],
    top_n_sigma=[0.0, 0.0, 0.0, 0.0, 2.5, 0.0],
    epsilon_cutoff=[0.0, 0.0, 0.0, 1e-3, 0.0, 0.0],
    eta_cutoff=[0.0, 0.0, 0.0, 0.0, 1e-3, 0.0],
    top_h=[1.0, 1.0, 1.0, 1.0, 0.9, 1.0],
    xtc_probability=[0.0, 0.0, 0.5, 0.0, 0.0, 0.0],
    xtc_threshold=[0.1, 0.1, 0.05, 0.1, 0.1, 0.1],
    repetition_penalty=[1.0, 1.3, 1.0, 1.0, 1.0, 1.0],
    presence_penalty=[0.0, 0.0, 0.5, 0.0, 0.0, 0.0],
    frequency_penalty=[0.3, 0.0, 0.0, 0.0, 0.0, 0.0],
    dry_multiplier=[0.0, 0.0, 0.0, 0.8, 0.0, 0.0],
    logit_bias=[None, {3: 2.0}, None, None, {7: -np.inf}, None],
)
GAINS = presets.Gains(low_entropy=6.0, high_entropy=12.0, dropped_mass_limit=0.4, target_entropy=3.0)
PAGES = Selection(dense_layers=0, rules=SelectionRules(sink_pages=1, recent_pages=1, min_pages=2))


@pytree
class Stepwise:
    """Heats every row by the number of steps so far, which all rows share."""

    gain: Any = 0.02

    def init(self, action: Any) -> Shared:
        return Shared(jnp.int32(0))

    def update(self, signal: Any, action: Any, state: Shared) -> tuple[Any, Shared]:
        heated = signal.requested_temperature * (1 + self.gain * state.value.astype(jnp.float32))
        return action._replace(temperature=heated), Shared(state.value + 1)


def begin(model: models.Model, controller: Any, dtype: str = "float32", **options: Any) -> Any:
    """A state with prompts of several lengths."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in LENGTHS]
    shape, create = model.decoder.shape, sharding.create
    pool = create(lambda: allocate(shape, ROWS, 128, page_size=8, dtype=dtype), model.mesh)
    options |= dict(key=jax.random.key(7), max_tokens=60, sample=parameters(ROWS, **SAMPLED))
    return start(model.decoder, model.params, controller, pool, prompts, **options)


def limits() -> Any:
    """Constraints: allowed tokens, a token that is forced, a least length, and log-probabilities."""
    sets = np.full((2, mask_words(VOCABULARY)), -1, np.int32)
    sets[1] = 0x0F0F0F0F  # of every byte of the vocabulary, the first four tokens
    row = np.arange(ROWS)
    return no_constraints(ROWS, VOCABULARY, num_sets=2)._replace(
        masked=jnp.asarray(row == 5),
        sets=Shared(jnp.asarray(sets)),
        mask=jnp.ones((ROWS, 1), jnp.int32),
        expected=jnp.full((ROWS, 1), -2, jnp.int32),
        min_length=jnp.asarray(np.where(row == 1, 99, 0).astype(np.int32)),
        forced=jnp.asarray(np.where(row == 4, 11, -1).astype(np.int32)),
        report_logprobs=jnp.asarray(row % 2 == 1),
    )


def launch(model: models.Model, state: Any, advance: Callable[..., Any], *rest: Any) -> dict[str, Any]:
    """What a launch of `advance(params, state, *rest)` emits, and the collectives of its program.

    Args:
        model: whose mesh runs it.
        state: of the loop.
        advance: a step of the loop, or a pass with drafts.
        *rest: what every step takes besides.
    """

    def program(params: Any, state: Any, *rest: Any) -> Any:
        return loop.run(lambda s, _: advance(params, s, *rest), state, STEPS, STEPS)[::2]

    def on_devices(params: Any, state: Any, *rest: Any) -> Any:
        return sharding.launch(model.decoder, program, params, state, *rest)

    compiled = jax.jit(on_devices, donate_argnums=1).lower(model.params, state, *rest).compile()
    after, trace = compiled(model.params, state, *rest)
    unequal = differing(after._replace(key=()))
    after, trace = jax.device_get((after, trace))
    exchanged = [(c.operation, c.shapes, c.num_bytes) for c in collectives(compiled.as_text() or "")]
    values = {name: np.asarray(x).tolist() for name, x in trace._asdict().items() if name != "top_logprobs"}
    likeliest = [np.asarray(x).tolist() for x in jax.tree.leaves(trace.top_logprobs)]
    entropies = np.asarray(after.ledger.entropy).tolist()
    reported = {"likeliest": likeliest, "entropies": entropies}
    return {**values, **reported, "collectives": exchanged, "differing": unequal}


def differing(tree: Any) -> list[str]:
    """The arrays that every device should have, and not all have alike."""
    names = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        first, *others = (np.asarray(shard.data) for shard in x.addressable_shards)
        alike = all(np.array_equal(first, other, equal_nan=True) for other in others)
        if x.is_fully_replicated and not alike:
            names.append(jax.tree_util.keystr(path))
    return names


def model_on(devices: int) -> models.Model:
    """The model, divided over so many devices."""
    model = tiny.model(1, **SIZES)
    return model if devices == 1 else models.shard(model, make_mesh(devices))


def constrained(model: models.Model) -> dict[str, Any]:
    """Every sampling parameter, Mirostat, constraints, log-probabilities."""
    law = chain(PerRow(Mirostat(jnp.linspace(1.5, 4.0, ROWS), jnp.full(ROWS, 0.1))))
    step = lambda p, s, c, limit: loop.step(model.decoder, p, c, s, constraints=limit)
    return launch(model, begin(model, law), step, law, limits())


def controlled(model: models.Model) -> dict[str, Any]:
    """Control on all three scales: temperatures, pages left unread, and four of six rows in a step."""
    lossy = presets.preset("full-lossy", gains=GAINS).controller
    laws = chain(*lossy.controllers, Every(Scheduling(4), 2))
    step = lambda p, s, c: loop.step(model.decoder, p, c, s, width=5)
    return launch(model, begin(model, laws, page_policy=PAGES), step, laws)


def drafted(model: models.Model) -> dict[str, Any]:
    """Drafts of the model itself on few pages, which are quantised, under control of the temperature."""
    law = presets.preset("micro", gains=GAINS).controller
    drafts = pruned_drafter(DRAFTED, shortest_context=0), draft_length(ROWS, widths=(1, 2, 4))
    drafter = speculator(ROWS, *drafts)
    drafting = lambda p, s, c, d: loop.speculative_step(model.decoder, p, c, d, s)
    return launch(model, begin(model, law, "int8", speculator=drafter), drafting, law, drafter)


def shared(model: models.Model) -> dict[str, Any]:
    """A law whose state all rows share."""
    law = Stepwise()
    return launch(model, begin(model, law), lambda p, s, c: loop.step(model.decoder, p, c, s), law)


def replayed(model: models.Model) -> dict[str, Any]:
    """Gradients of a replay with respect to a gain and to the output projection."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, 3)), jnp.int32)
    state = begin(model, chain(Integral(2.0)))

    def loss(gain: Any, params: Any) -> jax.Array:
        trace = loop.replay(model.decoder, params, chain(Integral(gain)), state, tokens)[1]
        return trace.tempered_entropy.sum() + trace.surprisal.sum()

    gain, params = jax.grad(loss, (0, 1))(jnp.float32(2.0), model.params)
    return {"gain": float(gain), "kernel": np.asarray(params["lm_head"]["kernel"]).tolist()}


def scored(model: models.Model) -> dict[str, Any]:
    """Log-probabilities of the tokens of a chunk of a prompt, with the logits of all positions."""
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, (2, 6)).astype(np.int32)
    chunk = PrefillChunk(np.array([1, 4]), tokens, np.array([5, 3], np.int32), np.array([99, 99], np.int32))
    _, output = loop.launch_prefill(model.decoder, model.params, begin(model, chain()), chunk, scored=True)
    return {"scores": [np.asarray(x).tolist() for x in output.scores]}


CASES = {1: (constrained, controlled, drafted, shared, replayed, scored)}
CASES |= {2: (drafted, shared, replayed, scored), 4: (constrained, controlled)}


def report(names: set[str]) -> dict[int, dict[str, Any]]:
    """What the cases of these names do, by number of devices and name."""
    models_on = {devices: model_on(devices) for devices in CASES}
    chosen = {n: [case for case in cases if case.__name__ in names] for n, cases in CASES.items()}
    return {n: {case.__name__: case(models_on[n]) for case in cases} for n, cases in chosen.items()}


if __name__ == "__main__":
    print(json.dumps(report({*sys.argv[1:]})))
