"""qkv beside PyTorch's scaled_dot_product_attention on this CPU, in one process, repetitions interleaved, best of each.

Needs torch, which is too big to be installed for you: pip install torch. Rows have the form of the other suites."""

import argparse
import datetime
import json
import pathlib
import time

import numpy as np
import qkv

try:
    import torch
except ImportError:
    torch = None


def best_rates(contestants, repetitions):
    """name -> best rate, of (name, work, call)."""
    best = dict.fromkeys((name for name, _, _ in contestants), 0.0)
    for _ in range(repetitions + 1):  # the first warms up
        for name, work, call in contestants:
            start = time.perf_counter()
            call()
            best[name] = max(best[name], work / (time.perf_counter() - start))
    return best


def prefill(dtype, heads, kv_heads, dim, tokens, causal):
    """Dense prefill of one request; both read the same tensors."""
    query, key, value = (torch.randn(tokens, h, dim, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    name = "bf16" if dtype == torch.bfloat16 else "f32"
    mask = qkv.mask.causal() if causal else qkv.mask.everything()
    spec = qkv.LayerSpec(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, query_dtype=name, kv_dtype=name, mask=mask
    )
    attention = qkv.Attention(spec)
    plan = attention.plan(
        qkv.Batch(query_start_loc=np.array([0, tokens], np.int32), seq_lens=np.array([tokens], np.int32))
    )
    out = torch.empty_like(query)
    batched = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
    gflop = 4e-9 * tokens * tokens * dim * heads * (0.5 if causal else 1)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return (
        f"prefill d{dim} s{tokens} {'causal' if causal else 'full'} h{heads}/{kv_heads} {name}",
        "GFLOP/s",
        [
            ("qkv", gflop, lambda: attention.forward(query, key, value, plan, out)),
            ("torch sdpa", gflop, lambda: sdpa(*batched, is_causal=causal, enable_gqa=heads != kv_heads)),
        ],
    )


def decode(requests, keys, heads, kv_heads, dim):
    """One token a request. qkv reads pages of 16 tokens; torch reads dense keys of equal length, its best case."""
    key, value = (torch.randn(requests, kv_heads, keys, dim).bfloat16() for _ in range(2))
    query = torch.randn(requests, heads, dim).bfloat16()
    out = torch.empty_like(query)
    pages = keys // 16
    as_pages = [
        tensor.view(requests, kv_heads, pages, 16, dim).transpose(1, 2).reshape(requests * pages, kv_heads, 16, dim)
        for tensor in (key, value)
    ]
    cache = qkv.KvCache(*(tensor.transpose(1, 2) for tensor in as_pages))
    spec = qkv.LayerSpec(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        query_dtype="bf16",
        kv_dtype="bf16",
        cache=qkv.CacheSpec(page_size=16),
    )
    attention = qkv.Attention(spec)
    plan = attention.plan(
        qkv.Batch(
            query_start_loc=np.arange(requests + 1, dtype=np.int32),
            seq_lens=np.full(requests, keys, np.int32),
            block_table=np.arange(requests * pages, dtype=np.int32).reshape(requests, pages),
        )
    )
    gigabytes = 2e-9 * requests * keys * kv_heads * dim * 2
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return (
        f"decode {requests}x{keys // 1024}k h{heads}/{kv_heads} d{dim} page16 bf16 head-major",
        "GB/s",
        [
            ("qkv", gigabytes, lambda: attention.forward(query, cache, plan, out)),
            ("torch sdpa", gigabytes, lambda: sdpa(query.unsqueeze(2), key, value, enable_gqa=True)),
        ],
    )


def cases():
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (64, 128):
            for causal in (False, True):
                yield lambda dtype=dtype, dim=dim, causal=causal: prefill(dtype, 16, 16, dim, 4096, causal)
    yield lambda: prefill(torch.bfloat16, 32, 8, 128, 2048, True)
    yield lambda: decode(8, 4096, 32, 8, 128)
    yield lambda: decode(32, 4096, 32, 8, 128)
    yield lambda: decode(1, 65536, 32, 8, 128)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="build/bench/torch.json", help="where the rows go (default: %(default)s)")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    if torch is None:
        print("torch is not installed in this environment, so its peer rows are left out: pip install torch")
        return
    torch.set_num_threads(qkv.num_threads())
    print(f"torch {torch.__version__} beside qkv ({qkv.instruction_set_in_use()}), {qkv.num_threads()} threads")
    rows = []
    for make in cases():
        case, unit, contestants = make()
        rates = best_rates(contestants, arguments.repetitions)
        own, peer = rates["qkv"], rates["torch sdpa"]
        print(f"{case:<52} {own:8.1f} {unit:<8} {own / peer:6.2f} x torch sdpa ({peer:.1f})", flush=True)
        rows.append(
            {
                "case": case,
                "unit": unit,
                "higher_is_better": True,
                "qkv": own,
                "peers": {f"torch {torch.__version__} sdpa": peer},
                "limit": None,
                "commit": arguments.commit,
                "date": datetime.date.today().isoformat(),
            }
        )
    path = pathlib.Path(arguments.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=2) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
