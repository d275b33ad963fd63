"""The draft-length law as it ships, run over records: the drafter's loop, the choice of a pass, and learning.

The functions are the product's. Only the step of the drafter is replaced, by what was recorded.
"""

import dataclasses
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax.phases.batch import Batch
from entropic_jax.speculation import ControlledModel, Draft, PassPlan, Speculator, draft
from entropic_jax.speculation.autoregressive import AutoregressiveDrafter, DraftedToken
from entropic_jax.speculation.drafter import DraftRecord
from entropic_jax.state import RUNNING, Ledger, State
from entropic_jax.state.cache import Cache
from entropic_jax.state.pytree import pytree

from .stopping import Drafts


@pytree
class RecordedSteps(AutoregressiveDrafter):
    """Drafts the recorded tokens, each with its recorded entropy, as long as the law goes on."""

    entropy: jax.Array | None = None  # float32 [k], nats

    def step(self, model: ControlledModel, batch: Batch, began: Batch) -> DraftedToken:
        """See `AutoregressiveDrafter`."""
        assert self.entropy is not None, "`steps_of` leaves it to be set"
        number = (batch.state.length - began.state.length)[0]
        after = batch.state._replace(length=batch.state.length + 1)
        return DraftedToken(after, after.token, self.entropy[number][None], batch.active)

    def drafting(self, model: ControlledModel) -> tuple[ControlledModel, slice]:
        """See `AutoregressiveDrafter`. No layer of the cache is written."""
        return model, slice(0, 0)


@pytree
class RecordedDraft:
    """Drafts what a drafter without steps has drafted."""

    acceptance: jax.Array  # float32 [k]
    offered: jax.Array  # int32 []

    @property
    def most_tokens(self) -> int:
        """k, the tokens it proposes at most."""
        return self.acceptance.shape[0]

    def draft(self, model: Any, batch: Batch, max_drafts: jax.Array) -> tuple[Batch, Draft]:
        """See `speculation.Drafter`."""
        number = jnp.minimum(self.offered[None], max_drafts)
        return batch, Draft(jnp.zeros((1, self.most_tokens), jnp.int32), number, self.acceptance[None])


def steps_of(drafter: Any, model: ControlledModel) -> RecordedSteps:
    """A drafter with the numbers of one of the product's, whose steps are to be recorded ones.

    Args:
        drafter: the drafter.
        model: whose tokens it drafts.
    """
    numbers = drafter.calibrated(model)
    names = [field.name for field in dataclasses.fields(AutoregressiveDrafter)]
    return RecordedSteps(**{name: getattr(numbers, name) for name in names})


@partial(jax.jit, static_argnames="most_tokens")
def _pass(
    speculator: Speculator,
    length: jax.Array,
    room: jax.Array,
    record: DraftRecord,
    accepted: jax.Array,
    most_tokens: int,
) -> tuple[PassPlan, DraftRecord]:
    """The plan of a pass, and the record of drafts after it.

    Args:
        speculator: the law, with recorded drafts.
        length: int32 `[]`, cached positions.
        room: int32 `[]`, tokens that may be drafted.
        record: before the pass.
        accepted: int32 `[]`, tokens that the draft begins with and the text has.
        most_tokens: k.
    """
    none: dict[str, Any] = dict.fromkeys(State._fields)
    zero, absent = jnp.zeros(1), cast(Any, None)
    state: Any = State(**none)._replace(  # what drafters and law read
        token=jnp.zeros(1, jnp.int32),
        length=length[None],
        evicted=jnp.zeros(1, jnp.int32),
        limit=(length + room + 1)[None],
        status=jnp.full(1, RUNNING),
        cache=Cache((), *(absent,) * (len(Cache._fields) - 1)),
        ledger=Ledger(*(zero,) * len(Ledger._fields)),
        speculation=record,
    )
    model = ControlledModel(absent, absent, absent)
    _, plan = draft(speculator, model, Batch(state, jnp.ones(1, bool)), state.limit, None)
    hits = jnp.minimum(accepted[None], plan.num_drafted)
    return plan, speculator.learn(record, jnp.ones(1, bool), plan, hits)


class Replay:
    """A text under the law: seconds, passes, tokens drafted and verified.

    Args:
        speculator: the drafter, `RecordedSteps` for those with steps, and the law.
        text: the drafts of the text.
        entropy: float `[positions, k]`, nats, of drafts; None where P(accepted) is recorded.
        acceptance: float `[positions, k]`, P(accepted) as the drafter stated it; None where entropies are.
        length: int `[positions]`, cached positions.
    """

    def __init__(
        self,
        speculator: Speculator,
        text: Drafts,
        entropy: np.ndarray | None,
        acceptance: np.ndarray | None,
        length: np.ndarray,
    ) -> None:
        self.seconds, self.verified, self.drafted = 0.0, [], 0
        widths = np.asarray(speculator.law.widths)
        position, record = 0, speculator.init(1)
        while position < len(text.accepted):
            if (rest := int(record.rest[0])) > 0:
                rested = range(position, min(position + rest, len(text.accepted)))
                self.seconds += float(text.verify_seconds[rested, 0].sum())
                self.verified += [0] * len(rested)
                position, record = rested.stop, record._replace(rest=jnp.zeros(1, jnp.int32))
                continue
            if entropy is not None:
                recorded = dataclasses.replace(speculator.drafter, entropy=jnp.float32(entropy[position]))
            else:
                assert acceptance is not None, "one of both is recorded"
                offered = jnp.int32(text.offered[position])
                recorded = RecordedDraft(jnp.float32(acceptance[position]), offered)
            plan, record = _pass(
                dataclasses.replace(speculator, drafter=recorded),
                jnp.int32(length[position]),
                jnp.int32(text.room[position]),
                record,
                jnp.int32(text.accepted[position]),
                recorded.most_tokens,
            )
            verified, steps = int(plan.num_drafted[0]), 0
            if entropy is not None:
                steps = int(plan.draft.num_tokens[0])
            # A pass is paid for by its compiled size, which may be larger than what it verifies.
            paid = min(int(widths[int(plan.size)]) - 1, text.verify_seconds.shape[1] - 1)
            self.seconds += steps * text.step_seconds[position] + text.verify_seconds[position, paid]
            self.verified.append(verified)
            self.drafted += steps
            position += min(int(text.accepted[position]), verified) + 1
