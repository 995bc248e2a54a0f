"""Two requests in one step: the first is being answered (1 new token), the second brings a prompt of 5 tokens."""

import numpy as np
import qkv

spec = qkv.LayerSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, cache=qkv.CacheSpec(page_size=4))
attention = qkv.Attention(spec)  # once a layer
cache = qkv.KvCache(np.zeros((8, 4, 2, 64), np.float32), np.zeros((8, 4, 2, 64), np.float32))  # 8 pages of 4 tokens
batch = qkv.Batch(
    query_start_loc=np.array([0, 1, 6], np.int32),  # new tokens: row 0, rows 1 to 5
    seq_lens=np.array([7, 5], np.int32),  # keys, cached and new
    block_table=np.array([[3, 1], [6, 2]], np.int32),  # the pages of each request, by position
    slot_mapping=np.array([1 * 4 + 2, 24, 25, 26, 27, 8], np.int64),  # page * 4 + offset of each new token
)
plan = attention.plan(batch)  # once a step
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((6, heads, 64), np.float32) for heads in (8, 2, 2))
attention.update_cache(key, value, cache, plan)
out = attention.forward(query, cache, plan)
exact, _ = qkv.reference.attention(spec, batch, query, cache)
print(f"{plan}\noutput {out.shape}, largest error against float64: {np.abs(out - exact).max():.1e}")
