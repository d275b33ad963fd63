"""More devices than KV heads: the tokens of one device, no page is gathered, each device has its share."""

from collections import Counter

import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.analysis.collectives import collectives
from entropic_jax.models.sharding import check_page_shards, kv_head_copies, with_kv_head_copies

from .marks import keep
from .test_sharding import CONFIG, ROWS, SUMS, forbidden, reports, size_of

# Models of one and two KV heads. "/1" and "/2": how many devices divide a KV head; the others have copies.
CASES = {
    "grouped": ("4", "8", "8/2", "4/1"),
    "single": ("4", "8"),
    "single-olmo2": ("4",),
    "grouped-gpt-oss": ("2x2", "1x4"),
}
ALL = [(family, mesh) for family, meshes in CASES.items() for mesh in meshes]
MESHES = keep(ALL, ("grouped", "8/2"))  # which has copies as well
HEADS, HEAD_DIM = 8, 16  # of the queries of `tests.mesh_programs`


def shares(mesh: str, kv_heads: int) -> tuple[int, int]:
    """How many devices have the same KV head, and how many of them divide it."""
    sharers = size_of(mesh) // kv_heads
    return sharers, int(mesh.partition("/")[2] or sharers)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), MESHES)
def test_fewer_kv_heads_than_devices_give_the_tokens_of_one_device(family, mesh):
    device, divided = reports(family, mesh)
    np.testing.assert_allclose(divided["logits"], device["logits"], atol=2e-4, rtol=0)
    assert np.ptp(device["logits"]) > 1
    # Devices that have copies choose pages for their own queries, and so may choose other pages.
    for preset in ("off", "full-lossy") if "/" not in mesh else ("off",):
        assert divided[preset]["tokens"] == device[preset]["tokens"]
        for name in ("entropy", "kept_fraction", "dropped_mass", "certificate"):
            np.testing.assert_allclose(divided[preset][name], device[preset][name], atol=1e-3)
    assert np.mean(device["full-lossy"]["kept_fraction"]) < 0.9, "nothing was pruned"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), MESHES)
def test_devices_that_share_a_kv_head_hold_their_share_of_it(family, mesh):
    device, divided = reports(family, mesh)
    pool_pages, kv_heads = device["pool_shape"][:2]
    sharers, shards = shares(mesh, kv_heads)
    local_pages = (pool_pages - 1) // shards + 1  # a scratch page is on every device
    assert divided["pool_shape"][:2] == [local_pages, 1]
    of_head = device["pool_bytes"] // (pool_pages * kv_heads)  # in all layers
    assert divided["pool_bytes"] == of_head * local_pages * size_of(mesh)
    biases = family in ("grouped", "grouped-gpt-oss")
    head = (64 + biases) * 2 * HEAD_DIM * 4  # keys and values of a layer
    copied = divided["layers"] * (sharers // shards - 1) * kv_heads * head
    assert divided["weight_bytes"] - device["weight_bytes"] == copied
    assert not divided["misplaced"]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), MESHES)
def test_devices_that_share_a_kv_head_exchange_queries_and_parts_of_outputs(family, mesh):
    device, divided = reports(family, mesh)
    _, shards = shares(mesh, device["pool_shape"][1])
    heads = HEADS // size_of(mesh) * shards  # of a group
    gathered = "all-gather", ROWS * (heads + 2) * HEAD_DIM * 4
    exchanged = "all-to-all", ROWS * heads * (HEAD_DIM + 1) * 4
    in_program = collectives(divided["program"])
    counted = Counter((c.operation, c.num_bytes) for c in in_program)
    assert counted[gathered] == counted[exchanged] == (divided["layers"] if shards > 1 else 0)
    others = [c for c in in_program if (c.operation, c.num_bytes) not in (gathered, exchanged)]
    sums = SUMS.get(family.rpartition("-")[2], 2) * divided["layers"] + 1
    assert Counter(c.operation for c in others) == {"all-reduce": sums, "all-to-all": 1, "all-gather": 2}
    assert not forbidden(others)


def test_kv_heads_that_cannot_be_divided_are_copied_and_refused_where_asked_for():
    config = models.Config(**{**CONFIG, "num_key_value_heads": 2})
    assert [check_page_shards(config, devices) for devices in (1, 2, 4)] == [1, 1, 2]
    assert kv_head_copies(config, 4) == 1 and with_kv_head_copies(config, 4) == config
    cohere = models.Config(
        **{**CONFIG, "architecture": "CohereForCausalLM", "num_key_value_heads": 2, "use_qk_norm": True}
    )
    assert check_page_shards(cohere, 4) == 1 and kv_head_copies(cohere, 4) == 2
    expected = (
        "size must be 1 for CohereForCausalLM: its norms of queries and keys have a vector per head; got 2"
    )
    with pytest.raises(models.ModelError, match=expected):
        check_page_shards(cohere, 4, 2)
