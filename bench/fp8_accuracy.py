"""How much of the result 8-bit caches cost: relative error against float64, for each kind of scale. The table of
docs/fp8.md:  python bench/fp8_accuracy.py"""

import numpy as np
import qkv

HEADS, KV_HEADS, DIM, PAGE, KEYS, REQUESTS = 16, 4, 128, 16, 4096, 2
ROW_SIZE = {"f8e4m3": 448.0, "f8e5m2": 57344.0, "i8": 127.0}
FORMATS = [("bf16", "none")] + [
    (dtype, scales)
    for dtype, granularities in (
        ("f8e4m3", ("per_tensor", "per_head", "per_request_head", "per_token_head")),
        ("f8e5m2", ("per_tensor", "per_token_head")),
        ("i8", ("per_tensor", "per_head", "per_token_head")),
    )
    for scales in granularities
]


def draw_cases(rng):
    """name -> (query, key, value), all float32; keys and values of the requests one after another."""

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    def plain():
        return (
            normal(REQUESTS, HEADS, DIM),
            normal(REQUESTS * KEYS, KV_HEADS, DIM),
            normal(REQUESTS * KEYS, KV_HEADS, DIM),
        )

    yield "normal", plain()
    for smallest in (0.05, 0.0005):
        query, key, value = plain()
        of_heads = np.array([smallest, 0.3, 2, 12], np.float32)[:, None]
        query /= np.repeat(of_heads, HEADS // KV_HEADS, axis=0)
        yield f"heads of sizes {smallest} to 12", (query, key * of_heads, value * of_heads)
    query, key, value = plain()
    key[:, :, [7, 50, 99]] *= 40  # what models do to a few channels of their keys
    query[:, :, [7, 50, 99]] /= 40
    yield "3 of 128 key channels x 40", (query, key, value)
    query, key, value = plain()
    value[rng.choice(len(value), 16, replace=False)] *= 300
    yield "16 of 8192 values x 300", (query, key, value)
    query, key, value = plain()
    key[rng.choice(len(key), 16, replace=False)] *= 6
    yield "16 of 8192 keys x 6: few keys get all the weight", (query, key, value)


def attention_in_float64(query, key, value):
    query, key, value = (array.astype(np.float64) for array in (query, key, value))
    out = np.empty((REQUESTS, HEADS, DIM))
    for r in range(REQUESTS):
        own = slice(r * KEYS, (r + 1) * KEYS)
        for h in range(HEADS):
            scores = key[own, h // (HEADS // KV_HEADS)] @ query[r, h] / np.sqrt(DIM)
            weights = np.exp(scores - scores.max())
            out[r, h] = weights @ value[own, h // (HEADS // KV_HEADS)] / weights.sum()
    return out


def largest(array, scales):
    """The largest magnitudes that scales of a kind are made for; those of tokens are made by the library."""
    magnitude = np.abs(array).reshape(REQUESTS, KEYS, KV_HEADS, DIM)
    axes = {"per_tensor": (0, 1, 2, 3), "per_head": (0, 1, 3), "per_request_head": (1, 3)}[scales]
    return np.atleast_1d(magnitude.max(axis=axes))


def attention_of_cache(dtype, scales, query, key, value):
    layer = qkv.LayerSpec(
        num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, kv_dtype=dtype, mask="true",
        kv_scales=scales, cache=qkv.CacheSpec(PAGE),
    )  # fmt: skip
    num_pages = REQUESTS * KEYS // PAGE
    pages = [np.zeros((num_pages, PAGE, KV_HEADS, DIM), qkv.array.numpy_dtype(dtype)) for _ in range(2)]
    cache_scales = [None, None]
    if scales == "per_token_head":
        cache_scales = [np.zeros((num_pages, PAGE, KV_HEADS), np.float32) for _ in range(2)]
    elif scales != "none":
        cache_scales = [np.float32(largest(array, scales) / ROW_SIZE[dtype]) for array in (key, value)]
    cache = qkv.KvCache(*pages, key_scale=cache_scales[0], value_scale=cache_scales[1])
    attention = qkv.Attention(layer)
    # Written as the prompts of the requests, then read by one query of each.
    lengths = np.full(REQUESTS, KEYS, np.int32)
    table = np.arange(num_pages, dtype=np.int32).reshape(REQUESTS, -1)
    prompts = qkv.Batch(np.arange(REQUESTS + 1, dtype=np.int32) * KEYS, lengths, table, np.arange(REQUESTS * KEYS))
    attention.update_cache(key, value, cache, attention.plan(prompts))
    step = qkv.Batch(np.arange(REQUESTS + 1, dtype=np.int32), lengths, table)
    return attention.forward(query, cache, attention.plan(step))


def main():
    cases = list(draw_cases(np.random.default_rng(20261129)))
    print(
        "| keys and values | "
        + " | ".join(f"{dtype} {scales}" for dtype, scales in FORMATS).replace(" none", "")
        + " |"
    )
    print("|---" * (len(FORMATS) + 1) + "|")
    for name, tensors in cases:
        exact = attention_in_float64(*tensors)
        # By row, so that heads of large values do not hide the others.
        size = np.linalg.norm(exact, axis=-1)
        errors = []
        for dtype, scales in FORMATS:
            error = np.linalg.norm(attention_of_cache(dtype, scales, *tensors) - exact, axis=-1) / size
            errors.append(f"{100 * error.mean():.2f} / {100 * error.max():.2f}")
        print(f"| {name} | " + " | ".join(errors) + " |")


if __name__ == "__main__":
    main()
