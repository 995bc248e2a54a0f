"""Layers that are shown some of the keys: the states of all ranks merge into the whole layer's."""

import numpy as np
import pytest
import qkv

PAGE = 4


def make_layer(**changes):
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "cache": qkv.CacheSpec(page_size=PAGE)}
    return qkv.LayerSpec(**sizes, mask="causal & window(20, 0)", **changes)


def test_states_of_ranks_merge_into_the_whole_layer():
    rng = np.random.default_rng(3)
    starts, lengths = np.array([0, 3, 4], np.int32), np.array([37, 10], np.int32)
    query = rng.standard_normal((4, 4, 16), np.float32)
    keys = [rng.standard_normal((2, n, 2, 16)).astype(np.float32) for n in lengths]

    def forward(layer, num_ranks=1):
        shard = layer.shard
        pages = np.full((2, 2 * 10, PAGE, 2, 16), np.nan, np.float32)
        table = np.arange(20, dtype=np.int32).reshape(2, 10)
        for r, n in enumerate(lengths):
            own = [p for p in range(n) if p // shard.interleave_size % num_ranks == shard.rank]
            for local, position in enumerate(own):
                pages[:, table[r, local // PAGE], local % PAGE] = keys[r][:, position]
        attention = qkv.Attention(layer)
        plan = attention.plan(qkv.Batch(starts, lengths, table))
        lse = np.empty((4, 4), np.float32)
        out = np.empty((4, 4, 16), np.float32)
        attention.forward(query, qkv.KvCache(pages[0], pages[1]), plan, out=out, lse=lse)
        return out, lse

    whole, whole_lse = forward(make_layer())
    states = [forward(make_layer(shard=qkv.Shard(rank, 3, 2)), 3) for rank in range(3)]
    merged, merged_lse = np.empty_like(whole), np.empty_like(whole_lse)
    qkv.merge_states(states, out=merged, lse=merged_lse)
    np.testing.assert_allclose(merged, whole, atol=1e-5)
    np.testing.assert_allclose(merged_lse, whole_lse, atol=1e-5)


def test_slots_are_those_of_the_rank_that_keeps_the_token():
    starts, lengths = np.array([0, 4], np.int32), np.array([10], np.int32)
    batch = qkv.Batch(starts, lengths, np.array([[7, 5]], np.int32))
    slots = [qkv.shard_slots(batch, PAGE, qkv.Shard(rank, 2, 2)) for rank in range(2)]
    assert slots[0].tolist() == [-1, -1, 5 * PAGE, 5 * PAGE + 1]  # positions 8 and 9 are its tokens 4 and 5
    assert slots[1].tolist() == [7 * PAGE + 2, 7 * PAGE + 3, -1, -1]


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(qkv.Error, match="key_run"):
        make_layer(key_run="middle")
    with pytest.raises(qkv.Error, match=r"shard.interleave_size: got 3"):
        qkv.Attention(make_layer(shard=qkv.Shard(0, 2, 3)))
    layer = make_layer(key_run="context", shard=qkv.Shard(1, 2, 4))
    assert layer.key_run == "context" and layer.shard == qkv.Shard(1, 2, 4)
    assert "Shard(rank=1, num_ranks=2, interleave_size=4)" in repr(layer)
