"""Output collector: from the outputs of a launch to new tokens of its sequences, and to those that ended."""

import time
from typing import Any, NamedTuple

import numpy as np

from entropic_jax.methods.entropix_branches import SearchCounts
from entropic_jax.phases.prefill import PrefillOutput
from entropic_jax.state import FAILED, FINISH_REASONS, RUNNING

from ..request.transcript import Token
from .device_state import DecodeOutput
from .grammars import Accepted, accept, finish
from .launch_costs import MeasuredLaunch
from .launch_planner import InFlight
from .prefix_cache import page_hashes
from .running_batch import RunningBatch
from .sequence import ACCEPTED, DRAFTED, Sequence, alternatives

NOT_NUMBERS = "the model computed logits that are not numbers"


class DraftCounts(NamedTuple):
    """Counts of speculative decoding since the start."""

    num_drafts: int = 0  # passes that verified drafted tokens of a row, one for each such row
    num_draft_tokens: int = 0  # tokens verified in them
    num_accepted_tokens: int = 0  # of these, accepted

    def with_launch(self, metrics: np.ndarray) -> "DraftCounts":
        """The counts after a launch: metrics `[len(TRACE_FIELDS), n, rows]`, 0 where nothing was emitted."""
        drafted = metrics[DRAFTED]
        new = (drafted > 0).sum(), drafted.sum(), metrics[ACCEPTED].sum()
        return DraftCounts(*(count + int(more) for count, more in zip(self, new, strict=True)))


class OutputCollector:
    """Collects launches, in the order in which they were given to the device."""

    def __init__(self, batch: RunningBatch, page_size: int, tokenizer: Any, exact: bool) -> None:
        """Start with nothing collected.

        Args:
            batch: sequences that have a row.
            page_size: positions per page.
            tokenizer: turns tokens into text.
            exact: as in `Scheduler`.
        """
        self.batch, self.page_size, self.tokenizer, self.exact = batch, page_size, tokenizer, exact
        self.tally = np.zeros(len(SearchCounts._fields), np.int64)  # counts of the branching sampler
        self.draft_counts = DraftCounts()
        self.last_collected = time.perf_counter()

    def collect(self, launch: InFlight) -> None:
        """Collect one launch; waits until the device has finished it."""
        if launch.prefill is not None:
            self._collect_prefill(launch, launch.prefill)
        if launch.output is not None:
            self._collect_decode(launch, launch.output)
        elif launch.prefill is not None:
            self.batch.planner.record_prefill(launch, self._elapsed(launch))

    def _elapsed(self, launch: InFlight) -> float:
        """Seconds that a launch took which the device has just finished."""
        begin, self.last_collected = max(launch.start_time, self.last_collected), time.perf_counter()
        return self.last_collected - begin

    # Prefill.

    def _collect_prefill(self, launch: InFlight, prefill: PrefillOutput) -> None:
        granted, table = np.asarray(prefill.granted), np.asarray(prefill.table)
        scores = [np.asarray(x) for x in prefill.scores] if launch.scored else ()
        for index, (sequence, epoch, begin, end) in enumerate(launch.chunks):
            if sequence.epoch != epoch:
                continue
            if not granted[index]:
                raise RuntimeError(f"row {sequence.row} was granted no pages although they were reserved")
            full_pages = min(end, len(sequence.prompt)) // self.page_size
            hashes = sequence.page_hashes[:full_pages]
            self.batch.block_manager.cache_prefix(sequence.row, hashes, table[index], self.batch.updates)
            if launch.scored:
                logprob, token, values = (x[index] for x in scores)
                number = sequence.engine_request.prompt_logprobs or 0
                sequence.prompt_scores += [
                    (float(logprob[i]), alternatives(token[i], values[i], number)) for i in range(end - begin)
                ]
                if end == len(sequence.prompt) - 1:
                    self.send_prompt(sequence)

    def send_prompt(self, sequence: Sequence) -> None:
        """Send the prompt with its logprobs, all of which are known."""
        sequence.prompt_scored = True
        tokens = sequence.scored_prompt(self.tokenizer.stream(skip_special=False))
        self.batch.send(sequence, sequence.delta(prompt=tokens, cached_tokens=sequence.cached_tokens))

    # Decode.

    def _collect_decode(self, launch: InFlight, output: DecodeOutput) -> None:
        batch, num_tokens = self.batch, np.asarray(output.num_tokens)  # waits for the device
        steps, idle = int(output.num_steps), max(0.0, launch.start_time - self.last_collected)
        seconds = self._elapsed(launch)
        timestamp = self.last_collected
        tokens, metrics = np.asarray(output.token).T.tolist(), np.asarray(output.metrics)
        emitted = np.arange(metrics.shape[1])[:, None] < num_tokens
        valid = np.where(emitted, metrics, 0.0)
        sums = valid.sum(1)
        if steps and launch.prefill is None:
            drafts = float(valid[DRAFTED].sum())
            measured = MeasuredLaunch(steps, seconds, float(num_tokens.sum()), drafts, idle)
            batch.planner.record_launch(launch, measured)
        elif launch.prefill is not None:
            batch.planner.record_prefill(launch, seconds, steps)
        if launch.program.speculates:
            self.draft_counts = self.draft_counts.with_launch(valid)
        batch.expected_drop[:] = np.asarray(output.expected_drop)
        self.tally += np.asarray(output.tally)
        status, length = np.asarray(output.status).tolist(), np.asarray(output.length)
        cost = np.asarray(output.cost).tolist()
        top_logprobs = None
        for sequence, row, epoch in launch.running:
            if sequence.epoch != epoch:
                continue
            batch.collected(row, int(length[row]), launch)
            sequence.cost = cost[row]
            count = int(num_tokens[row])
            first = _skip_replayed(sequence, count)
            if sequence.grammar is not None and sequence.num_replayed < sequence.num_replay_tokens:
                sequence.num_scheduled = sequence.num_replayed  # it may have paused before
            logprobs = None
            if sequence.logprobs is not None:
                top_logprobs = top_logprobs or tuple(np.asarray(x) for x in output.top_logprobs)
                logprobs = tuple(x[first:, row] for x in top_logprobs)
            if count > first:
                accepted = _accept(sequence, tokens[row][first:count])
                new = accepted.tokens
                columns, total = metrics[:, first : first + len(new), row], sums[:, row]
                final = sequence.append(new, columns, total if len(new) == count else None, logprobs)
                self._emit(sequence, final, accepted, output, timestamp)
                if len(new) < count - first and not sequence.ended:
                    batch.retract(sequence)
                    continue
            if not sequence.ended and status[row] != RUNNING:
                error = NOT_NUMBERS if status[row] == FAILED else None
                batch.end(sequence, FINISH_REASONS[status[row]], error)
        batch.metrics_hooks.launched(launch.program.width, steps, num_tokens, metrics, seconds)

    def _emit(
        self,
        sequence: Sequence,
        final: list[Token],
        accepted: Accepted,
        output: DecodeOutput,
        timestamp: float,
    ) -> None:
        """Send the tokens whose text is final, and finish the sequence if its text has ended."""
        batch, transcript = self.batch, sequence.transcript
        if transcript.finish_reason is None:
            final += finish(sequence, accepted)
        if sequence.first_token_time is None:
            sequence.first_token_time = timestamp
        batch.metrics_hooks.emitted(sequence, len(accepted.tokens), timestamp)
        sequence.last_token_time = timestamp
        if transcript.finish_reason is not None:
            self._cache_generated(sequence, output)
            batch.vacate(sequence)
            batch.finish(sequence, final)
        elif final:
            batch.send(sequence, sequence.delta(final, cached_tokens=sequence.cached_tokens))

    def _cache_generated(self, sequence: Sequence, output: DecodeOutput) -> None:
        """Offer the pages of a whole text to the prefix cache, for a later prompt that continues it."""
        manager = self.batch.block_manager
        if sequence.needs_replay(self.exact) or manager.prefix_cache is None:
            return  # prefill of the text would not make the same pages
        if sequence.num_drafted and self.batch.planner.may_prune:
            return  # summaries of its pages may count keys of drafts that were not accepted
        text = (*sequence.prompt, *sequence.generated)[:-1]
        of_prompt = sequence.page_hashes
        parent = of_prompt[-1] if of_prompt else sequence.root_hash
        rest = text[len(of_prompt) * self.page_size :]
        hashes = [*of_prompt, *page_hashes(parent, rest, self.page_size)]
        table = np.asarray(output.table)[sequence.row]
        manager.cache_prefix(sequence.row, hashes, table, self.batch.updates)


def _accept(sequence: Sequence, tokens: list[int]) -> Accepted:
    """The tokens drawn last, as far as the grammar of their sequence takes them."""
    if sequence.grammar is None:
        return Accepted(tokens)
    begin = time.perf_counter()
    accepted = accept(sequence.plan, len(sequence.generated), sequence.grammar, tokens)
    sequence.note_planning(time.perf_counter() - begin)
    return accepted


def _skip_replayed(sequence: Sequence, count: int) -> int:
    """How many of the `count` tokens of a launch are replayed ones, which the sequence has already."""
    replayed = min(count, sequence.num_replay_tokens - sequence.num_replayed)
    if replayed > 0:
        sequence.num_replayed += replayed
        return replayed
    return 0
