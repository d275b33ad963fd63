"""Offline engine of the samplers, with branches for Entropix."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from entropic_jax import chain, models
from entropic_jax.methods import entropix_search
from entropic_jax.methods.entropix_branches import SearchPlan
from entropic_jax.methods.presets import Preset
from entropic_jax.state import FAILED, FINISH_REASONS, RUNNING, cache

from ..options.control_options import Control
from ..options.kv_cache import KvCacheDtype
from ..options.samplers import law
from ..request import Request
from ..request.transcript import Token, Transcript
from .engine import FIRST_LAUNCH, SMALLEST_CONTEXT, STREAM_LAUNCH, Engine, drawing, power_of_two

if TYPE_CHECKING:
    from entropic_jax.calibration import Calibration

ROOM = 2  # pages that each branch may hold for itself


def make_engine(
    control: Control,
    calibration: "Calibration | None",
    model: models.Model,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> Engine:
    """An engine whose rows are sampled by what `control.preset` names. RequestError where it cannot be.

    Args:
        control: names the sampler and its options.
        calibration: the model's calibration, or None.
        model: to sample from.
        kv_cache_dtype: the dtype of the KV cache.
    """
    setting = Preset(chain(law(control, calibration, model)), None, None)
    belief = 1.0 if calibration is None else calibration.temperature
    branches = dict(control.gains).get("branches", SearchPlan().branches)
    if control.preset != "entropix" or branches == 1:
        return Engine(model, setting, belief, kv_cache_dtype)
    return SearchEngine(model, setting, belief, kv_cache_dtype, SearchPlan(branches=branches))


class SearchEngine(Engine):
    """An engine whose sequences branch and go back; a token is handed out once nothing can change it.

    Args:
        model: with a tokenizer.
        preset: whose controller has an `Entropix`.
        belief_temperature: T_cal, by which logits are divided before H₁ is measured.
        kv_cache_dtype: the dtype of the KV cache.
        plan: the plan of the search.
    """

    def __init__(
        self,
        model: models.Model,
        preset: Preset,
        belief_temperature: float,
        kv_cache_dtype: KvCacheDtype,
        plan: SearchPlan,
    ) -> None:
        super().__init__(model, preset, belief_temperature, kv_cache_dtype)
        self.plan = plan

    def _decode(
        self, requests: Sequence[Request], prompts: list[list[int]], launch: int
    ) -> Iterator[tuple[int, Transcript, list[Token]]]:
        """Like that of `Engine`, by `entropix_search`."""
        rows = [row for row, prompt in enumerate(prompts) if prompt]
        eos, plan, k = self.model.stop_tokens, self.plan, self.plan.branches
        transcripts = {
            row: Transcript(requests[row], self.tokenizer.stream(), len(prompts[row]), eos) for row in rows
        }
        if not rows:
            return
        search = self._begin([requests[row] for row in rows], [prompts[row] for row in rows])
        steps = FIRST_LAUNCH if launch == STREAM_LAUNCH else launch
        num_emitted = dict.fromkeys(rows, 0)  # tokens handed out
        open_rows = set(rows)
        while open_rows:
            search = entropix_search.generate(
                self.model.decoder, self.model.params, self.preset.controller, search, steps, plan=plan
            )
            texts = entropix_search.traces(search, plan)
            last = np.asarray(entropix_search.final_positions(search, plan))
            status, branching = np.asarray(search.state.status)[::k], np.asarray(search.steps_left) > 0
            for number, row in enumerate(rows):
                if row not in open_rows:
                    continue
                ended = status[number] != RUNNING and not branching[number]
                count = max(num_emitted[row], int(last[number]) - len(prompts[row]) + 1)
                fresh = jax.tree.map(lambda x: x[num_emitted[row] : count], texts[number])
                fresh = jax.tree.map(lambda x: x[:, None], fresh)
                settled = self._record(transcripts[row], fresh, 0)
                num_emitted[row] = count
                if transcripts[row].finish_reason is None and ended:
                    failed = status[number] == FAILED
                    error = "the model computed logits that are not numbers" if failed else None
                    settled += transcripts[row].finish(FINISH_REASONS[int(status[number])], error)
                if transcripts[row].finish_reason is not None:
                    open_rows.discard(row)
                yield row, transcripts[row], settled
            steps = launch
            closed = np.array([row not in open_rows for row in rows])
            search = entropix_search.end_sequences(search, plan, closed)

    def _begin(self, requests: Sequence[Request], prompts: list[list[int]]) -> entropix_search.SearchState:
        k, decoder = self.plan.branches, self.model.decoder
        needed = max(len(p) + r.max_tokens for p, r in zip(prompts, requests, strict=True))
        context = min(power_of_two(max(needed, SMALLEST_CONTEXT)), self.context)
        size = cache.default_page_size()
        pages = len(prompts) * (-(-context // size) + ROOM * (k - 1))
        spread = [request for request in requests for _ in range(k)]
        room = dict(pages=pages, page_size=size, dtype=self.pages)
        return entropix_search.start(
            decoder,
            self.model.params,
            self.preset.controller,
            cache.allocate(decoder.shape, len(spread), context, **room),
            prompts,
            self.plan,
            key=jax.random.key(0),
            max_tokens=[r.max_tokens for r in requests],
            seeds=[r.seed for r in requests],
            sample=drawing(spread),
            stop=[self._stops(request) for request in spread],
            belief_temperature=self.belief_temperature,
        )

    def _stops(self, request: Request) -> tuple[int, ...]:
        """Tokens that end a branch, too."""
        eos = () if request.ignore_eos else tuple(self.model.stop_tokens)
        return (*eos, *(() if request.min_tokens else request.stop_token_ids))
