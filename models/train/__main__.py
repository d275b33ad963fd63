"""Train the embedded model: `python -m entropic_jax.models.train --work DIR`.

Two stages: short windows at a constant learning rate, then windows of the full context while the rate
falls to zero. Progress goes to `DIR/log.csv` and `DIR/log.png`; checkpoints make it resumable.
"""

import os
import sys

CORES = os.cpu_count() or 1
TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8589934592"
TUNABLES += ":glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=268435456"
if __name__ == "__main__" and "GLIBC_TUNABLES" not in os.environ:
    # Fresh pages for every temporary buffer are slow: keep freed memory, in huge pages.
    os.environ["GLIBC_TUNABLES"] = TUNABLES
    os.environ.setdefault(
        "XLA_FLAGS",
        f"--xla_force_host_platform_device_count={CORES} --xla_cpu_multi_thread_eigen=false",
    )
    os.execv(sys.executable, [sys.executable, "-m", "entropic_jax.models.train", *sys.argv[1:]])

import argparse
import csv
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from . import data, export, forward, history
from .shape import Shape

WARM_UP = 40  # steps


def initialise(shape: Shape, seed: int) -> dict[str, Any]:
    """Random parameters; projections into the residual stream start at zero."""
    rng = np.random.default_rng(seed)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    normal = lambda *size: (rng.standard_normal(size) * size[0] ** -0.5).astype(np.float32)
    layer = lambda: {
        "input_layernorm": np.ones(hidden, np.float32),
        "q_proj": normal(hidden, q),
        "k_proj": normal(hidden, kv),
        "v_proj": normal(hidden, kv),
        "o_proj": np.zeros((q, hidden), np.float32),
        "post_attention_layernorm": np.ones(hidden, np.float32),
        "gate_proj": normal(hidden, inner),
        "up_proj": normal(hidden, inner),
        "down_proj": np.zeros((inner, hidden), np.float32),
    }
    embedding = rng.standard_normal((shape.vocab_size, hidden)).astype(np.float32) * 0.02
    return {
        "embed_tokens": embedding,
        "layers": [layer() for _ in range(shape.num_hidden_layers)],
        "norm": np.ones(hidden, np.float32),
    }


def optimiser(name: str, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Muon for the matrices of the layers and Adam for the rest, or AdamW for all."""
    if name == "adamw":
        rule = optax.adamw(lambda s: 0.15 * schedule(s), b2=0.98, weight_decay=0.1)
    else:

        def matrices(params):
            spec = optax.contrib.MuonDimensionNumbers((0,), (1,))
            chosen = jax.tree.map(lambda x: spec if x.ndim == 2 else None, params)
            return {**chosen, "embed_tokens": None}

        rule = optax.contrib.muon(
            schedule,
            weight_decay=0.01,
            adam_learning_rate=lambda s: 0.2 * schedule(s),
            adam_b2=0.98,
            muon_weight_dimension_numbers=matrices,
        )
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def _make_step(shape: Shape, rule: optax.GradientTransformation, mesh: jax.sharding.Mesh):
    """One update from tokens `[micro, device rows, time + 1]`: accumulate over `micro`, then average."""

    def gradients(params, tokens, weights):
        def micro(carry, xs):
            (loss, plain), g = jax.value_and_grad(forward.loss, has_aux=True)(params, *xs, shape)
            return jax.tree.map(jnp.add, carry, (g, loss, plain)), None

        zero = jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(micro, (zero, 0.0, 0.0), (tokens, weights))
        return jax.lax.psum((*sums, weights.sum()), "data")

    sharded = jax.shard_map(
        gradients, mesh=mesh, in_specs=(P(), P(None, "data"), P(None, "data")), out_specs=P(), check_vma=False
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens, weights):
        g, loss, plain, total = sharded(params, tokens, weights)
        g = jax.tree.map(lambda x: x / total, g)
        updates, state = rule.update(g, state, params)
        return optax.apply_updates(params, updates), state, plain / weights.size, optax.global_norm(g)

    return step


def plot(log: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = list(csv.DictReader(log.open()))
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    tokens, bits = ([float(r[c]) for r in rows] for c in ("tokens", "bits_per_byte"))
    axes.plot([t / 1e6 for t in tokens], bits, lw=0.5, color="#4477aa")
    axes.set(xlabel="million tokens", ylabel="bits per byte (training batch)", ylim=(0.8, 3))
    figure.savefig(log.with_suffix(".png"), dpi=120)
    plt.close(figure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m entropic_jax.models.train", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for corpus, checkpoints and log")
    parser.add_argument("--init", type=Path, help="exported model to go on from, with its tokenizer")
    parser.add_argument("--tokens", type=float, default=20e6, help="tokens of the short stage")
    parser.add_argument("--long-tokens", type=float, default=5e6, help="tokens at the full context")
    parser.add_argument("--length", type=int, default=1024, help="window of the short stage")
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--micro-tokens", type=int, default=2048, help="per device, at least one window")
    parser.add_argument("--task-share", type=float, default=0.5, help="of generated windows, long stage")
    parser.add_argument("--optimiser", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--minutes", type=float, default=1e9, help="checkpoint and stop after this long")
    parser.add_argument("--seed", type=int, default=0)
    return parser


class _Plan(NamedTuple):
    """The steps of the two stages, and the batches of each."""

    short_steps: int
    steps: int  # of both stages
    batch_tokens: int
    micro_tokens: int  # per device
    short_length: int
    long_length: int
    long_task_share: float

    def schedule(self, learning_rate: float) -> optax.Schedule:
        """A short warm-up, a constant rate for the short stage, and a fall to zero in the long one."""
        decay_from = max(WARM_UP, self.short_steps)
        schedules = [
            optax.linear_schedule(0.0, learning_rate, WARM_UP),
            optax.constant_schedule(learning_rate),
            optax.linear_schedule(learning_rate, 0.0, max(1, self.steps - decay_from)),
        ]
        return optax.join_schedules(schedules, [WARM_UP, decay_from])

    def length(self, step: int) -> int:
        """Targets of a window of a step."""
        return self.short_length if step < self.short_steps else self.long_length

    def task_share(self, step: int) -> float:
        """Share of windows of generated documents of a step."""
        return 0.2 if step < self.short_steps else self.long_task_share

    def windows(self, step: int, devices: int) -> tuple[int, int]:
        """Windows of a step, a multiple of the devices, and the passes that they are split into."""
        length = self.length(step)
        windows = -(-max(1, self.batch_tokens // length) // devices) * devices
        per_device = max(1, self.micro_tokens // length)
        return windows, max(1, windows // (per_device * devices))


def _open_log(path: Path, first: int) -> TextIO:
    """The log, without the rows of steps after the checkpoint, which are repeated."""
    rows = path.read_text().splitlines()[1:] if path.exists() else []
    rows = [row for row in rows if int(row.split(",")[0]) <= first]
    path.write_text(
        "\n".join(["step,tokens,length,bits_per_byte,gradient_norm,tokens_per_second", *rows, ""])
    )
    return path.open("a", newline="")


def _bytes_per_token(streams: data.Streams) -> float:
    text = streams.text[:300]
    tokens = np.mean([len(streams.tokenizer.encode(t).ids) for t in text])
    return float(np.mean([len(t.encode()) for t in text]) / tokens)


class _Trainer:
    """Parameters and optimiser state on the devices, with their checkpoints."""

    def __init__(self, work: Path, shape: Shape, rule: optax.GradientTransformation, params: Any, keep: int):
        """Continue from the last checkpoint, if there is one.

        Args:
            work: folder of the checkpoints.
            shape: of the model.
            rule: the optimiser.
            params: initial parameters.
            keep: checkpoints of multiples of this step are never deleted.
        """
        self.mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        everywhere = NamedSharding(self.mesh, P())
        self.params = jax.device_put(params, everywhere)
        self.state = jax.jit(rule.init, out_shardings=everywhere)(self.params)
        options = ocp.CheckpointManagerOptions(max_to_keep=3, keep_period=keep)
        self.manager = ocp.CheckpointManager(work / "checkpoints", options=options)
        self.first = self.manager.latest_step() or 0
        if self.first:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._tree())
            restored = self.manager.restore(self.first, args=ocp.args.StandardRestore(target))
            self.params, self.state = restored["params"], restored["state"]
        self._step = _make_step(shape, rule, self.mesh)

    def _tree(self) -> dict[str, Any]:
        return {"params": self.params, "state": self.state}

    def save(self, step: int) -> None:
        """Write a checkpoint in the background."""
        self.manager.save(step, args=ocp.args.StandardSave(self._tree()))

    def update(self, tokens: np.ndarray, weights: np.ndarray, micro: int) -> tuple[float, float]:
        """Take one step; returns the loss in nats per token and the norm of the gradient.

        Args:
            tokens: `[windows, length + 1]`.
            weights: `[windows, length]`.
            micro: passes that the windows are split into.
        """
        sharding = NamedSharding(self.mesh, P(None, "data"))
        split = (jax.device_put(x.reshape(micro, len(x) // micro, -1), sharding) for x in (tokens, weights))
        self.params, self.state, nats, norm = self._step(self.params, self.state, *split)
        return float(nats), float(norm)


def _train(trainer: _Trainer, plan: _Plan, streams: data.Streams, arguments: argparse.Namespace, log: Path):
    """Take the steps that are left, with their checkpoints and rows of the log."""
    first, bytes_per_token = trainer.first, _bytes_per_token(streams)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    began = time.monotonic()
    with Progress(*columns) as progress, _open_log(log, first) as out:
        bar = progress.add_task("training", total=plan.steps, completed=first)
        length, source = 0, iter(())
        for number in range(first, plan.steps):
            windows, micro = plan.windows(number, trainer.mesh.size)
            if plan.length(number) != length:
                length = plan.length(number)
                share = plan.task_share(number)
                source = data.batches(streams, arguments.seed, number, windows, length, share)
                if number > first:
                    trainer.save(number)
            tokens, weights = next(source)
            start = time.monotonic()
            nats, norm = trainer.update(tokens, weights, micro)
            bits = nats / np.log(2) / bytes_per_token
            speed = weights.size / (time.monotonic() - start)
            seen = (number + 1) * plan.batch_tokens
            csv.writer(out).writerow([number + 1, seen, length, f"{bits:.4f}", f"{norm:.3f}", f"{speed:.0f}"])
            out.flush()
            progress.update(
                bar, completed=number + 1, description=f"{bits:.3f} bits/byte {speed:,.0f} tokens/s"
            )
            late = time.monotonic() - began > 60 * arguments.minutes
            if (number + 1) % 100 == 0 or number + 1 == plan.steps or late:
                trainer.save(number + 1)
                plot(log)
            if late:
                break
    trainer.manager.wait_until_finished()


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    history.record_run(work, parser, arguments)
    shape = Shape()
    tokenizer = Tokenizer.from_file(str(arguments.init / "tokenizer.json")) if arguments.init else None
    streams = data.prepare(work, shape.vocab_size, tokenizer)
    short_steps = int(arguments.tokens) // arguments.batch_tokens
    plan = _Plan(
        short_steps=short_steps,
        steps=short_steps + int(arguments.long_tokens) // arguments.batch_tokens,
        batch_tokens=arguments.batch_tokens,
        micro_tokens=arguments.micro_tokens,
        short_length=arguments.length,
        long_length=shape.max_position_embeddings,
        long_task_share=arguments.task_share,
    )
    rule = optimiser(arguments.optimiser, plan.schedule(arguments.learning_rate))
    params = export.read(arguments.init)[0] if arguments.init else initialise(shape, arguments.seed)
    # The last checkpoint before the decay is kept, so that a longer first stage can continue from it.
    trainer = _Trainer(work, shape, rule, params, keep=max(1, short_steps))
    _train(trainer, plan, streams, arguments, work / "log.csv")


if __name__ == "__main__":
    main()
