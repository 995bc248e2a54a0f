"""A layer whose cache several ranks share, each a thread here."""

import threading

import numpy as np
import pytest
import qkv

PAGE, DIM, HEADS, KV_HEADS = 8, 16, 4, 2
STARTS = np.array([0, 1, 4], np.int32)
LENGTHS = np.array([50, 21], np.int32)


def make_layer(**changes):
    sizes = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "cache": qkv.CacheSpec(page_size=PAGE)}
    return qkv.LayerSpec(**sizes, mask="causal & window(30, 0)", sinks=[0.5, -1.0, 0.0, 2.0], **changes)


def make_tokens():
    rng = np.random.default_rng(5)
    query = rng.standard_normal((STARTS[-1], HEADS, DIM), np.float32)
    keys = [rng.standard_normal((2, n, KV_HEADS, DIM)).astype(np.float32) for n in LENGTHS]
    counts = np.diff(STARTS)
    new = np.concatenate([tokens[:, n - count :] for tokens, n, count in zip(keys, LENGTHS, counts, strict=True)], 1)
    return query, keys, new[0], new[1]


def batch_and_cache(shard, keys):
    """The rank's pages, with the contexts that it keeps and NaN everywhere else."""
    table = np.arange(14, dtype=np.int32).reshape(2, 7)
    pages = np.full((2, 14, PAGE, KV_HEADS, DIM), np.nan, np.float32)
    for request, (length, count) in enumerate(zip(LENGTHS, np.diff(STARTS), strict=True)):
        for position in range(length - count):
            if shard.rank_of(position) == shard.rank:
                local = shard.local_position(position)
                pages[:, table[request, local // PAGE], local % PAGE] = keys[request][:, position]
    slots = qkv.shard_slots(qkv.Batch(STARTS, LENGTHS, table), PAGE, shard)
    return qkv.Batch(STARTS, LENGTHS, table, slots), qkv.KvCache(pages[0], pages[1])


def run_rank(collectives, exchange, results):
    query, keys, key, value = make_tokens()
    layer = qkv.ContextParallel(make_layer(), collectives, exchange=exchange)
    batch, cache = batch_and_cache(layer.shard, keys)
    plan = layer.plan(batch)
    assert plan.exchanges and plan.workspace_bytes <= layer.workspace_bytes(4)
    first = 0 if exchange == "all_gather" else collectives.rank * layer.num_heads
    own = np.ascontiguousarray(query[:, first : first + layer.num_heads])
    lse = np.empty((layer.num_heads, 4), np.float32)
    out = layer.forward(own, key, value, cache, plan, lse=lse)
    layer.update_cache(key, value, cache, plan)
    again = layer.forward(own, key, value, cache, plan)  # the new tokens come from the arguments, cached or not
    np.testing.assert_array_equal(out, again)
    results[collectives.rank] = first, out, lse


@pytest.mark.parametrize("exchange", ["all_to_all", "reduce_scatter", "all_gather"])
def test_ranks_agree_with_one_layer(exchange):
    query, keys, key, value = make_tokens()
    attention = qkv.Attention(make_layer())
    batch, cache = batch_and_cache(qkv.Shard(), keys)
    plan = attention.plan(batch)
    attention.update_cache(key, value, cache, plan)
    whole_lse = np.empty((HEADS, 4), np.float32)
    whole = attention.forward(query, cache, plan, lse=whole_lse)

    results = {}
    threads = [
        threading.Thread(target=run_rank, args=(collectives, exchange, results))
        for collectives in qkv.in_process_ranks(2, timeout=30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for first, out, lse in results.values():
        np.testing.assert_allclose(out, whole[:, first : first + out.shape[1]], atol=2e-6)
        np.testing.assert_allclose(lse, whole_lse[first : first + out.shape[1]], atol=2e-6)


def test_one_rank_is_a_layer_of_its_own():
    results = {}
    run_rank(qkv.in_process_ranks(1)[0], "all_to_all", results)
    assert results[0][1].shape == (4, HEADS, DIM)


def test_what_does_not_fit_is_named():
    ranks = qkv.in_process_ranks(1)[0]
    with pytest.raises(qkv.Error, match=r"exchange: got .*broadcast"):
        qkv.ContextParallel(make_layer(), ranks, exchange="broadcast")
    with pytest.raises(qkv.Error, match=r"interleave_size: got 3; allowed: a divisor of layer\.cache\.page_size = 8"):
        qkv.ContextParallel(make_layer(), ranks, interleave_size=3)
