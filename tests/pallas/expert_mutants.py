"""Faults of the products of experts, as those of `mutants`."""

from .mutant import Tests, sown

GROUPED = "entropic_jax/pallas/grouped_matmul"
GROUPED_ON_CPU = Tests("tests/pallas/test_grouped_matmul.py", "cpu or same_bits")
GROUPED_REFERENCE = Tests("tests/pallas/test_grouped_matmul.py", "rows_are_multiplied and xla")
GROUPED_TPU = Tests("tests/pallas/test_grouped_matmul.py", "(test_tpu and late) or reads_a_matrix_once")
GROUPED_GPU = Tests("tests/pallas/test_grouped_matmul.py", "test_gpu and not compiles")

EXPERT_MUTANTS = (
    *sown(
        f"{GROUPED}/cpu.py",
        GROUPED_ON_CPU,
        (
            "the first matrix is that of group 0",
            "matrix = group + operand_integers(frame, 2, (1,))[0]",
            "matrix = group",
        ),
        (
            "all matrices have the scales of the first",
            "floats(scales + 4 * (matrix * width + column), (columns,))",
            "floats(scales + 4 * column, (columns,))",
        ),
        (
            "groups without rows take the place of others",
            "if end > start:",
            "if end >= start:",
        ),
        (
            "packed weights have the scales of the first matrix",
            "scale, group = scales + 2 * (matrix * shape[1] * width + column), inputs // shape[1]",
            "scale, group = scales + 2 * column, inputs // shape[1]",
        ),
    ),
    *sown(
        f"{GROUPED}/reference.py",
        GROUPED_REFERENCE,
        (
            "every block of a group is its last",
            "(number - ends[group] + blocks[group]) * block",
            "(blocks[group] - 1) * block",
        ),
    ),
    *sown(
        f"{GROUPED}/tpu.py",
        GROUPED_TPU,
        (
            "a tile keeps the rows of its last group",
            "jnp.where(of_rows, product, result[...].astype(jnp.float32))",
            "jnp.where(of_rows, product, 0.0)",
        ),
        (
            "a group lies in one tile",
            "tile = first_tile[group] + number - (visit_ends[group] - per_group[group])",
            "tile = first_tile[group] + 0 * number",
        ),
        (
            "places behind the last visit read another matrix",
            "number = jnp.minimum(place, jnp.maximum(total - 1, 0))",
            "number = place",
        ),
        ("even inputs meet odd ones", "- 8 for shift in (0, 4))", "- 8 for shift in (4, 0))"),
    ),
    *sown(
        f"{GROUPED}/gpu.py",
        GROUPED_GPU,
        (
            "every tile of a group is its first",
            "source = starts[group] + ROWS * (number - tile_ends[group] + tiles[group])",
            "source = starts[group] + 0 * number",
        ),
        ("a slot is filled while it is read", "@pl.when(step >= shape.slots)", "@pl.when(step < 0)"),
        (
            "all tiles have the scales of the first",
            "scales[0].at[tile, columns]",
            "scales[0].at[0, columns]",
        ),
    ),
)
