"""Chunked prefill: the prompts and the length of the next chunk, by the token budget and by measured time."""

import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from entropic_jax.phases.prefill import PrefillChunk
from entropic_jax.state.cache import ModelShape

from .options import Sizes
from .programs import Programs
from .sequence import DECODE, Sequence

# Cost of a chunk and of each prompt in it, in tokens prefilled in the same time. Every chunk reads the keys
# before it again, so few large chunks are best.
CHUNK_OVERHEAD, PROMPT_OVERHEAD = 32, 16
LONGEST_PASSED_OVER = 0.2  # seconds that shorter prompts may go before one whose prefill has begun
RATE = 0.5  # weight of the latest chunk in an estimate


class ScheduledChunk(NamedTuple):
    """The part of a prompt that a prefill computes."""

    sequence: Sequence
    epoch: int
    begin: int  # positions prefilled before
    end: int  # and after


class PrefillCosts:
    """Seconds of prefill chunks, estimated by the operations of a chunk and the rate of the latest ones.

    One rate serves all shapes. Short chunks have more seconds an operation than long ones, so that a longer
    chunk than the latest takes less than predicted: chunks grow step by step to the time that they may take.
    """

    def __init__(self, shape: ModelShape) -> None:
        """Start without an estimate.

        Args:
            shape: the sizes of the model, from which the operations of a chunk follow.
        """
        self._per_token = 2.0 * shape.weights
        self._per_pair = 4.0 * shape.layers * shape.heads * shape.head_dim  # of a query and a key
        self._launched: set[tuple] = set()  # programs that have run
        self._rates: dict[bool, float] = {}  # seconds an operation, by whether prompts are scored

    def operations(self, shape: tuple[int, int], begins: Iterable[int]) -> float:
        """Floating-point operations of a chunk; padding counts.

        Args:
            shape: prompts and tokens of each.
            begins: positions before each prompt's part; a prompt that is missing begins at 0.
        """
        prompts, size = shape
        pairs = size * (sum(begins) + prompts * size / 2)
        return prompts * size * self._per_token + pairs * self._per_pair

    def seconds(self, shape: tuple[int, int], begins: Iterable[int], scored: bool) -> float | None:
        """Predicted seconds of a chunk; None before one has run.

        Args:
            shape: as in `operations`.
            begins: as in `operations`.
            scored: whether the log-probabilities of the prompt are computed.
        """
        rate = self._rates.get(scored, self._rates.get(not scored))
        return None if rate is None else rate * self.operations(shape, begins)

    def record(self, shape: tuple[int, int], begins: Iterable[int], scored: bool, seconds: float) -> None:
        """Update the estimates by a chunk.

        Args:
            shape: as in `operations`.
            begins: as in `operations`.
            scored: as in `seconds`.
            seconds: what it took.
        """
        key = (*shape, scored)
        if key not in self._launched:  # it may have waited for its program
            self._launched.add(key)
            return
        rate = seconds / max(1.0, self.operations(shape, begins))
        previous = self._rates.get(scored, rate)
        self._rates[scored] = previous + RATE * (rate - previous)


class PrefillPlanner:
    """Chooses the next chunk among the prompts in prefill."""

    def __init__(self, programs: Programs, sizes: Sizes) -> None:
        """Start without an estimate of the time that a chunk takes.

        Args:
            programs: compiled programs.
            sizes: the sizes of rows, pages and programs.
        """
        self.programs, self.sizes = programs, sizes
        self.costs = PrefillCosts(programs.decoder.shape)
        self._scored = False  # whether the latest chunk computed log-probabilities of prompts

    def chunk(
        self, sequences: list[Sequence], seconds: float | None
    ) -> tuple[PrefillChunk, list[ScheduledChunk], bool]:
        """The next chunk of the prompts in prefill, which counts as prefilled from here on.

        A chunk holds either prompts whose logprobs are requested or others, and the result says which. Where
        there are both, their chunks alternate, so that neither kind waits for a crowd of the other. The
        prompt with the least left comes first, so that a short one does not wait for a long one.

        Args:
            sequences: in prefill; at least one.
            seconds: seconds that the chunk should take at most; None is no bound.
        """
        timestamp = time.perf_counter()
        sequences = sorted(sequences, key=lambda sequence: _order(sequence, timestamp))
        first = sequences[0].engine_request.priority
        kinds = {not s.prompt_scored for s in sequences if s.engine_request.priority == first}
        self._scored = scored = not self._scored if len(kinds) == 2 else kinds.pop()
        sequences = [s for s in sequences if s.prompt_scored != scored]
        prompts, size = self._shape(sequences, scored, seconds)
        chunk, scheduled = empty_chunk(prompts, size, self.sizes.rows), []
        for index, sequence in enumerate(sequences[:prompts]):
            length = len(sequence.prefill_tokens) - 1
            begin, end = sequence.num_prefilled, min(sequence.num_prefilled + size, length)
            chunk.rows[index], chunk.num_tokens[index] = sequence.row, end - begin
            chunk.tokens[index, : end - begin + 1] = sequence.prefill_tokens[begin : end + 1]
            chunk.total[index] = length
            sequence.num_prefilled, sequence.prefill_time = end, timestamp
            if end == length:
                sequence.stage = DECODE
            scheduled.append(ScheduledChunk(sequence, sequence.epoch, begin, end))
        return chunk, scheduled, scored

    def _shape(self, sequences: list[Sequence], scored: bool, seconds: float | None) -> tuple[int, int]:
        """The available shape (prompts, tokens) that prefills most for its cost; the first prompt is in it.

        A shape that would prefill more but is not available is compiled next, while this one serves. Of
        those that are predicted to take longer than `seconds`, only the shortest can be chosen. A sparse
        prefill method works on segments of fixed length, which no chunk may cut.
        """
        segment = self.sizes.shapes.segment or 0
        left = [_left(sequence) for sequence in sequences]
        uncut = [min(tokens, segment) for tokens in left]

        def throughput(shape: tuple[int, int]) -> float:
            prompts, size = shape
            tokens = sum(min(size, tokens) for tokens in left[:prompts])
            return tokens / (prompts * (size + PROMPT_OVERHEAD) + CHUNK_OVERHEAD)

        def predicted(shape: tuple[int, int]) -> float:
            begins = [sequence.num_prefilled for sequence in sequences[: shape[0]]]
            return self.costs.seconds(shape, begins, scored) or 0.0

        def best(shapes: list[tuple[int, int]]) -> tuple[int, int]:
            if seconds is not None:
                short = [shape for shape in shapes if predicted(shape) <= seconds]
                shapes = short or [min(shapes, key=predicted)]
            return max(shapes, key=throughput)

        shapes = [shape for shape in self.sizes.shapes.chunks if max(uncut[: shape[0]]) <= shape[1]]
        shape = best(shapes)
        if self.programs.require(prefill_key(shape, scored)):
            return shape
        available = [shape for shape in shapes if self.programs.available(prefill_key(shape, scored))]
        return best(available) if available else shape

    def seconds_left(self, sequences: list[Sequence]) -> float:
        """Predicted seconds until all of these prompts are complete, without decode steps between."""
        longest, total = self.sizes.shapes.longest_chunk, 0.0
        for sequence in sequences:
            tokens, begin = _left(sequence), sequence.num_prefilled
            halfway = [begin + tokens // 2] * longest[0]
            seconds = self.costs.seconds(longest, halfway, not sequence.prompt_scored) or 0.0
            total += seconds * tokens / (longest[0] * longest[1])
        return total

    def record(
        self, chunks: list[ScheduledChunk], shape: tuple[int, int], scored: bool, seconds: float
    ) -> None:
        """Update the estimate of what chunks cost by one that has been collected.

        Args:
            chunks: the parts of prompts that it held.
            shape: its shape, prompts and tokens.
            scored: whether log-probabilities of the prompts were computed.
            seconds: what it took.
        """
        self.costs.record(shape, [chunk.begin for chunk in chunks], scored, seconds)


def _left(sequence: Sequence) -> int:
    """Tokens of a prompt that are to be prefilled."""
    return len(sequence.prefill_tokens) - 1 - sequence.num_prefilled


def _order(sequence: Sequence, timestamp: float) -> tuple:
    """Sort key of prompts: priority, then those passed over for too long, then the fewest tokens left."""
    since = max(sequence.prefill_time, sequence.admitted_time or 0.0)
    priority = sequence.engine_request.priority
    if timestamp - since > LONGEST_PASSED_OVER:
        return priority, 0, since, 0.0
    return priority, 1, _left(sequence), sequence.admitted_time


def prefill_key(shape: tuple[int, int], scored: bool) -> tuple:
    """The key of a prefill program; its tokens have one more column, the token after the chunk.

    Args:
        shape: prompts and tokens of each.
        scored: whether it computes log-probabilities of the prompts.
    """
    return "prefill", shape[0], shape[1] + 1, scored


def empty_chunk(prompts: int, size: int, rows: int) -> PrefillChunk:
    """A chunk without a prompt, of the shape of others.

    Args:
        prompts: how many the chunk has room for.
        size: tokens of a prompt that it has room for.
        rows: number of rows of the batch; a chunk's row with this number stands for none.
    """
    return PrefillChunk(
        rows=np.full(prompts, rows, np.int32),
        tokens=np.zeros((prompts, size + 1), np.int32),
        num_tokens=np.zeros(prompts, np.int32),
        total=np.zeros(prompts, np.int32),
    )
