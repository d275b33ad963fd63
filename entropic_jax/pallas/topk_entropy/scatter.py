"""Scatter into a GPU's shared memory, at places that the threads compute. Pallas has no such operation.

The code uses the dialects of Mosaic GPU, which the interpreter does not know. With `portable`, operations on
whole arrays do the same.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

LENGTH = 512  # of the arrays that a warpgroup works on: four elements a thread
LAYOUT = plgpu.Layout.WG_STRIDED((LENGTH,), vec_size=4)
REF = plgpu.RefType()


def _elements(*arrays: mgpu.FragmentedArray):
    """The elements that this thread holds, of each array."""
    for registers in zip(*(array.registers.flat for array in arrays), strict=True):
        for place in range(ir.VectorType(registers[0].type).shape[0]):
            yield tuple(
                vector.extract(register, dynamic_position=[], static_position=[place])
                for register in registers
            )


def append(
    selected: Any, values: Any, places: Any, to_values: Any, to_places: Any, count: Any, portable: bool
) -> None:
    """Append the selected elements to lists in shared memory, in any order.

    Elements that do not fit are counted but not stored.

    Args:
        selected: bool, which elements are appended.
        values: float32, in registers.
        places: int32, in registers.
        to_values: list of the values, in shared memory.
        to_places: list of the places, in shared memory.
        count: int32 `[1]`, elements so far; those that do not fit are counted and not stored.
        portable: whether to use nothing that the interpreter lacks.
    """
    size = to_values.shape[0]
    if portable:
        before = count[0]
        number = jnp.where(selected, before + jnp.cumsum(selected.astype(jnp.int32)) - 1, size)
        for ref, array in ((to_values, values), (to_places, places)):
            ref[...] = ref[...].at[number].set(array, mode="drop")
        count[0] = before + selected.astype(jnp.int32).sum()
        return

    @plgpu.inline_mgpu(arg_types=(LAYOUT, LAYOUT, LAYOUT, REF, REF, REF))
    def store(_, selected, values, places, to_values, to_places, count):
        zero = arith.constant(ir.IndexType.get(), 0)
        unit = arith.constant(ir.IntegerType.get_signless(32), 1)
        room = arith.constant(ir.IntegerType.get_signless(32), size)
        for is_selected, value, place in _elements(selected, values, places):
            with mgpu.when(is_selected):
                number = memref.atomic_rmw(arith.AtomicRMWKind.addi, unit, count, [zero])
                with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, number, room)):
                    at = arith.index_cast(ir.IndexType.get(), number)
                    memref.store(value, to_values, [at])
                    memref.store(place, to_places, [at])
        mgpu.warpgroup_barrier()

    store(selected, values, places, to_values, to_places, count)


def place_at(
    numbers: Any, limit: int, values: Any, places: Any, to_values: Any, to_places: Any, portable: bool
) -> None:
    """Store elements under their numbers in lists in shared memory.

    Args:
        numbers: int32, the place of each element in the lists.
        limit: elements whose number is not below it are left out.
        values, places: in registers.
        to_values, to_places: lists in shared memory.
        portable: whether to use nothing that the interpreter lacks.
    """
    if portable:
        number = jnp.where(numbers < limit, numbers, to_values.shape[0])
        for ref, array in ((to_values, values), (to_places, places)):
            ref[...] = ref[...].at[number].set(array, mode="drop")
        return

    @plgpu.inline_mgpu(arg_types=(LAYOUT, LAYOUT, LAYOUT, REF, REF))
    def store(_, numbers, values, places, to_values, to_places):
        end = arith.constant(ir.IntegerType.get_signless(32), limit)
        for number, value, place in _elements(numbers, values, places):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, number, end)):
                at = arith.index_cast(ir.IndexType.get(), number)
                memref.store(value, to_values, [at])
                memref.store(place, to_places, [at])
        mgpu.warpgroup_barrier()

    store(numbers, values, places, to_values, to_places)
