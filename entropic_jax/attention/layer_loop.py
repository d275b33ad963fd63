"""Attention in a loop over layers: which layers one traced body can serve, and what it records of each.

Readers and observers see a pass layer after layer, while it is traced, and keep an entry for each layer. In a
loop the body is traced once for several layers: its entries are outputs of the loop, and are put back as if
the layers had been traced one after the other.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax


class LayerRecorder(Protocol):
    """A reader or an observer of a pass."""

    layer_stats: list[Any]  # an entry for each layer so far, a pytree of arrays

    def layer_kind(self, number: int) -> Hashable | None:
        """A key, equal for layers that one traced body can serve; None for a layer that needs its own.

        Args:
            number: number of the layer, from 0.
        """


class LoopedAttention:
    """The attention of a pass (`attend.attend_to`), which says what may run in a loop over layers.

    A function that is none of these runs in no loop, because it may keep what it sees of each layer.

    Args:
        attend: the attention of a layer.
        recorders: the reader and the observer that it calls, if any.
    """

    def __init__(self, attend: Callable[..., Any], recorders: Sequence[Any] = ()) -> None:
        self.attend, self.recorders = attend, tuple(recorders)

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """The attention of the next layer."""
        return self.attend(*operands, **options)

    def kinds(self, ahead: Sequence[int]) -> Hashable | None:
        """The kinds of work in some layers, the period of a pattern; None if these must be traced separately.

        Args:
            ahead: how many layers each is ahead of the next one.
        """
        kinds = tuple(_kind(x, number) for x in self.recorders for number in ahead)
        return None if None in kinds else kinds

    def begin(self) -> tuple[int, ...]:
        """How many layers each recorder has seen before a loop."""
        return tuple(len(recorder.layer_stats) for recorder in self.recorders)

    def take(self, begun: tuple[int, ...]) -> tuple[list[Any], ...]:
        """Takes away what was recorded since `begin`, which it returned: the outputs of a loop's body."""
        parts = tuple(r.layer_stats[count:] for r, count in zip(self.recorders, begun, strict=True))
        for recorder, count in zip(self.recorders, begun, strict=True):
            del recorder.layer_stats[count:]
        return parts

    def put(self, parts: tuple[list[Any], ...], repeats: int) -> None:
        """Records what a loop over layers has put out.

        Args:
            parts: what `take` returned in its body, with a leading axis of repeats.
            repeats: how often the body ran.
        """
        for recorder, part in zip(self.recorders, parts, strict=True):
            for repeat in range(repeats):
                recorder.layer_stats += jax.tree.map(lambda x, repeat=repeat: x[repeat], part)


def _kind(recorder: Any, ahead: int) -> Hashable | None:
    """The kind of work of a recorder so many layers ahead of the next one; None if it does not state one."""
    if not hasattr(recorder, "layer_kind"):
        return None
    return recorder.layer_kind(len(recorder.layer_stats) + ahead)
