"""What runs on the device: three programs over one board, which each of them consumes and returns.

`apply_commands` is every edit of the host, `read_prompts` a chunk of some prompts, `decode` some steps of all
running rows. They are compiled for a few shapes, ahead where it matters, and every later compilation counts.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import State, Trace, cache, loop
from entropic_jax.attention import Step, attend_to
from entropic_jax.control.scheduling import Moments, predicted_drop
from entropic_jax.methods import compaction
from entropic_jax.methods.method import Compression, Method
from entropic_jax.selection import Reads
from entropic_jax.state import FULL, RUNNING
from entropic_jax.terms import Likeliest, Terms, likeliest

from ..transcript import MEASURES
from .row_control import for_launch, turn_knobs

# Columns of `Commands.integers` and `.numbers`.
ROW, SEED, TOKEN, LIMIT, STATUS, SHARED, TOP_K = range(7)
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


Array = Any  # of NumPy on the host, of JAX in a program
PARKED = ("history", "signal", "action", "control", "ledger")


class Board(NamedTuple):
    """Everything on the device that changes: the rows, and the gains of their controllers."""

    state: State
    controller: Any


class Commands(NamedTuple):
    """Edits of the host, of a fixed size; in this order: keep pages, end rows, give pages up, place jobs."""

    retained: Array  # int32 [m], pages that the host keeps
    ended: Array  # bool [rows]
    dropped: Array  # int32 [m], pages that the host gives up
    integers: Array  # int32 [k, 7], of each job to place; its row is `rows` where there is none
    numbers: Array  # float32 [k, len(NUMBERS)]
    stops: Array  # int32 [k, stops]
    bias_tokens: Array  # int32 [k, slots]
    bias_values: Array  # float32 [k, slots]
    pages: Array  # int32 [k, most pages of a row], the first SHARED of which the job shares
    gains: Array  # float32 [k, n], of its controller
    prompt: Array | None = None  # bool [k, vocabulary], and
    generated: Array | None = None  # int32 [k, vocabulary]: its history, where a job is penalised


class Chunk(NamedTuple):
    """The next piece of some prompts."""

    rows: Array  # int32 [p]; `rows` where there is none
    tokens: Array  # int32 [p, n + 1]: the piece, and the token that follows it
    count: Array  # int32 [p], how many of the n
    last: Array  # bool [p]: the prompt is complete, the row runs from now on
    total: Array  # int32 [p], positions of the whole prompt


class Read(NamedTuple):
    """What came of a chunk."""

    enough: jax.Array  # bool [p]: there were pages; a row without is where it was
    table: jax.Array  # int32 [p, most pages of a row]
    scores: Any  # `Likeliest` [p, n, …] of the token after each, where asked for


class Output(NamedTuple):
    """What came of a launch; a row's tokens are the first `count` steps of it."""

    count: jax.Array  # int32 [rows]
    token: jax.Array  # int32 [capacity, rows]
    measures: jax.Array  # float32 [len(MEASURES), capacity, rows]
    status: jax.Array  # int32 [rows]
    length: jax.Array  # int32 [rows], of the text: what was taken out of the cache counts
    table: jax.Array  # int32 [rows, most pages of a row]
    forecast: jax.Array  # float32 [rows], E[ΔH⁺] of the next token, nats
    steps: jax.Array  # int32 [], that were run
    likeliest: Likeliest  # [capacity, rows, …]


def apply_commands(blank: State, board: Board, commands: Commands) -> Board:
    """Edit the board. `blank` is a row that holds nothing, as a state of one row."""
    state, rows = board.state, board.state.status.shape[0]
    row, shared = commands.integers[:, ROW], commands.integers[:, SHARED]
    pool = cache.retain(state.cache, commands.retained)
    pool = cache.release(pool, commands.ended)
    pool = cache.drop(pool, commands.dropped)
    pool = cache.share(pool, row, commands.pages, shared)
    placed = jnp.zeros(rows, bool).at[row].set(True, mode="drop")

    def clear(old, new):
        if old.ndim == 0 or old.shape[0] != rows:
            return old
        return jnp.where(placed.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    small = {name: value for name, value in state._asdict().items() if name != "cache"}
    state = state._replace(**jax.tree.map(clear, small, {name: getattr(blank, name) for name in small}))
    put = lambda array, values: array.at[row].set(values.astype(array.dtype), mode="drop")
    numbers = {name: commands.numbers[:, i] for i, name in enumerate(NUMBERS)}
    sampling = state.sampling._replace(
        **{name: put(getattr(state.sampling, name), values) for name, values in numbers.items()},
        top_k=put(state.sampling.top_k, commands.integers[:, TOP_K]),
        bias_tokens=put(state.sampling.bias_tokens, commands.bias_tokens),
        bias_values=put(state.sampling.bias_values, commands.bias_values),
    )
    history = state.history
    if commands.prompt is not None and commands.generated is not None:
        history = history._replace(
            prompt=put(history.prompt, commands.prompt),
            generated=put(history.generated, commands.generated),
        )
    state = state._replace(
        seed=put(state.seed, commands.integers[:, SEED]),
        token=put(state.token, commands.integers[:, TOKEN]),
        length=put(state.length, shared * pool.page_size),
        limit=put(state.limit, commands.integers[:, LIMIT]),
        status=put(jnp.where(commands.ended, FULL, state.status), commands.integers[:, STATUS]),
        stop=put(state.stop, commands.stops),
        sampling=sampling,
        history=history,
        action=state.action._replace(temperature=put(state.action.temperature, numbers["temperature"])),
        cache=pool,
    )
    return Board(state, turn_knobs(board.controller, row, commands.gains))


def park(board: Board, row: jax.Array) -> dict[str, Any]:
    """What a row has become beside its text: control, ledger, history. The board is not consumed."""
    return jax.tree.map(lambda x: x[row], {name: getattr(board.state, name) for name in PARKED})


def unpark(board: Board, row: jax.Array, parked: dict[str, Any]) -> Board:
    """Make a row that was placed what it was when it was parked."""
    put = lambda x, y: x.at[row].set(y)
    return board._replace(
        state=board.state._replace(
            **{name: jax.tree.map(put, getattr(board.state, name), parked[name]) for name in PARKED}
        )
    )


def read_prompts(
    decoder, params: Any, board: Board, chunk: Chunk, *, scored: bool, method: Method | None
) -> tuple[Board, Read]:
    """Append a piece to the cache of some rows; scored, with how likely each token of it was.

    A `method` says what the piece reads of those before it, and remembers what it saw.
    """
    state, rows = board.state, board.state.status.shape[0]
    start = state.length.at[chunk.rows].get(mode="fill", fill_value=0)
    wanted = jnp.where(chunk.count > 0, start + chunk.count, 0)
    pool, enough = cache.grant(
        state.cache, jnp.zeros(rows, jnp.int32).at[chunk.rows].set(wanted, mode="drop")
    )
    enough = enough.at[chunk.rows].get(mode="fill", fill_value=False)
    count = jnp.where(enough, chunk.count, 0)
    table = pool.table.at[chunk.rows].get(mode="fill", fill_value=pool.pages)
    piece, following = chunk.tokens[:, :-1], chunk.tokens[:, 1:]
    view, reader = pool._replace(table=table), None
    if method is not None:
        memory = jax.tree.map(lambda x: x.at[chunk.rows].get(mode="fill", fill_value=0), state.lists)
        reader = method.prompt_reader(view, memory, Step(start, count), chunk.total)
    attend = attend_to(view, Step(start, count), reader)
    hidden, layers = decoder.hidden(
        params, piece, start[:, None] + jnp.arange(piece.shape[1]), pool.layers, attend
    )
    scores = ()
    if scored:
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        found = likeliest(
            flat(decoder.logits(params, hidden)), flat(following), jnp.ones(following.size, bool)
        )
        scores = jax.tree.map(lambda x: x.reshape(*following.shape, *x.shape[1:]), found)
    runs = jnp.where(chunk.last & enough, chunk.rows, rows)
    state = state._replace(
        length=state.length.at[chunk.rows].add(count, mode="drop"),
        status=state.status.at[runs].set(RUNNING, mode="drop"),
        cache=pool._replace(layers=layers),
    )
    if reader is not None:
        put = lambda all_, x: all_.at[chunk.rows].set(x, mode="drop")
        state = state._replace(lists=jax.tree.map(put, state.lists, reader.memory()))
    return board._replace(state=state), Read(enough, table, scores)


def compress(board: Board, row: jax.Array, *, method: Method | None) -> tuple[Board, jax.Array]:
    """Keep of a row what the method keeps; also returns its pages, and the positions it lost, int32 `[2]`."""
    assert method is not None  # who asks for it has looked
    state = compaction.compress_row(board.state._replace(selection=method), row)
    found = jnp.stack([state.cache.granted[row], state.evicted[row]])
    return board._replace(state=state._replace(selection=board.state.selection)), found


def decode(
    decoder,
    params: Any,
    board: Board,
    steps: jax.Array,
    terms: Terms,
    forced: jax.Array,
    prior: Moments,
    *,
    width: int,
    selection: Reads | None,
    samples: bool,
) -> tuple[Board, Output]:
    """Run up to `steps` steps of the first `width` running rows; `forced` is `[capacity, rows]`.

    `samples`: the engine's sampler draws for some of them.
    """
    controller, capacity = for_launch(board.controller, samples, width), forced.shape[0]
    state = board.state._replace(selection=selection)

    def step(state: State, now: jax.Array) -> tuple[State, Trace]:
        return loop.step(
            decoder, params, controller, state, width=width, terms=terms._replace(forced=forced[now])
        )

    blank = jax.eval_shape(lambda s: step(s, jnp.int32(0))[1], state)
    trace = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), blank)

    def running(carry):
        done, state, _ = carry
        return (done < jnp.minimum(steps, capacity)) & (state.status == RUNNING).any()

    def advance(carry):
        done, state, trace = carry
        state, now = step(state, done)
        return done + 1, state, jax.tree.map(lambda all_, x: all_.at[done].set(x), trace, now)

    done, state, trace = jax.lax.while_loop(running, advance, (jnp.int32(0), state, trace))
    output = Output(
        count=trace.emitted.sum(0, dtype=jnp.int32),
        token=trace.token,
        measures=jnp.stack([getattr(trace, name) for name in MEASURES]),
        status=jnp.copy(state.status),
        length=state.length + state.evicted,
        table=jnp.copy(state.cache.table),
        forecast=predicted_drop(state.control[-1], prior),
        steps=done,
        likeliest=trace.likeliest,
    )
    return board._replace(state=state._replace(selection=board.state.selection)), output


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes that programs are compiled for."""

    widths: tuple[int, ...]  # rows of a step, ascending
    chunks: tuple[tuple[int, int], ...]  # (prompts, positions of each), by what they hold
    capacity: int  # most steps of a launch
    selections: tuple[Reads | None, ...]
    samplers: tuple[bool, ...] = (False,)  # whether rows are drawn by the engine's sampler
    method: Method | None = None  # of reading prompts and keeping what was read

    @property
    def segment(self) -> int | None:
        """Positions of a piece of a prompt, if it must have so many unless it is the last."""
        return None if self.method is None or self.method.prefill is None else self.method.segment

    @property
    def compression(self) -> Compression | None:
        """What the rows keep of their prompts."""
        return None if self.method is None else self.method.compression


class Programs:
    """The compiled programs, by shape."""

    def __init__(self, decoder: Any, params: Any, board: Board, prior: Moments, shapes: Shapes) -> None:
        self.decoder, self.params, self.shapes, self.prior = decoder, params, shapes, prior
        rows = board.state.status.shape[0]
        # One row that holds nothing, to clear others with. Copied: the board will be consumed.
        nothing: Any = None
        self.blank = jax.tree.map(
            lambda x: jnp.copy(x[:1]) if x.ndim and x.shape[0] == rows else jnp.copy(x),
            board.state._replace(cache=nothing),
        )
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self.compilations = 0
        self.compile_seconds = 0.0

    def apply(self, board: Board, commands: Commands) -> Board:
        """`apply_commands`."""
        run = self._program(("apply", commands.prompt is not None), self.blank, board, commands)
        return run(self.blank, board, commands)

    def read(self, board: Board, chunk: Chunk, scored: bool) -> tuple[Board, Read]:
        """`read_prompts`."""
        key = ("read", *chunk.tokens.shape, scored)
        return self._program(key, self.params, board, chunk)(self.params, board, chunk)

    def compress(self, board: Board, row: int) -> tuple[Board, jax.Array]:
        """`compress`."""
        return self._program(("compress",), board, np.int32(row))(board, np.int32(row))

    def decode(
        self, board: Board, steps: int, terms: Terms, forced: Any, kind: tuple[int, Reads | None, bool]
    ) -> tuple[Board, Output]:
        """`decode`, of a kind: width, selection, and whether some rows are drawn by the sampler."""
        given = (self.params, board, np.int32(steps), terms, forced, self.prior)
        return self._program(("decode", *kind), *given)(*given)

    def park(self, board: Board, row: int) -> dict[str, Any]:
        """`park`."""
        return self._program(("park",), board, np.int32(row))(board, np.int32(row))

    def unpark(self, board: Board, row: int, parked: dict[str, Any]) -> Board:
        """`unpark`."""
        return self._program(("unpark",), board, np.int32(row), parked)(board, np.int32(row), parked)

    def _program(self, key: tuple, *given: Any) -> Callable[..., Any]:
        return self._compiled.get(key) or self._compile(key, given)

    def _compile(self, key: tuple, given: tuple) -> Callable[..., Any]:
        begun = time.perf_counter()
        program, donated = {
            "apply": lambda: (apply_commands, 1),
            "park": lambda: (park, ()),
            "unpark": lambda: (unpark, 0),
            "compress": lambda: (partial(compress, method=self.shapes.method), 0),
            "read": lambda: (
                partial(read_prompts, self.decoder, scored=key[-1], method=self.shapes.method),
                1,
            ),
            "decode": lambda: (
                partial(decode, self.decoder, width=key[1], selection=key[2], samples=key[3]),
                1,
            ),
        }[key[0]]()
        compiled = jax.jit(program, donate_argnums=donated).lower(*given).compile()
        with self._lock:
            self._compiled[key] = compiled
            self.compilations += 1
            self.compile_seconds += time.perf_counter() - begun
        return compiled

    def compile_ahead(self, examples: list[tuple], workers: int, told: Callable[[int, int], None]) -> None:
        """Compile programs of `(key, arguments)` in parallel; `told(done, all)` after each."""
        examples = [example for example in examples if example[0] not in self._compiled]
        with ThreadPoolExecutor(workers) as pool:
            done = pool.map(lambda example: self._compile(*example), examples)
            for number, _ in enumerate(done, 1):
                told(number, len(examples))
