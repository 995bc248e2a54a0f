"""8-bit caches: decode of bf16 and of e4m3 queries beside bf16 ones on a bf16 cache, prefill of e4m3 queries beside
cuDNN's FP8 and of bf16 queries on e4m3 caches beside bf16 ones, and cache writes that quantise.

Decode is timed as in the table `decode`, its limit reads the same pages only; prefill as in `prefill`, keys in pages of
64. cuDNN (nvidia-cudnn-frontend) reads dense keys and leaves 8-bit outputs, qkv bf16 ones."""

import math

import numpy as np
import qkv
import torch

from gpu_tables import ops
from gpu_tables.decode import launches_from_memory
from gpu_tables.layers import FINITE_BITS, Heads, Layer, in_pages, make_plan, num_pages, views_of

DECODE_HEADS = [Heads(32, 8, 128), Heads(32, 4, 128), Heads(64, 8, 64)]
BATCHES = {
    "1x1k": [1024],
    "1x8k": [8192],
    "1x64k": [65536],
    "64x4k": [4096] * 64,
    "256x1k": [1024] * 256,
    "128x8k": [8192] * 128,
}
PREFILL_HEADS = [Heads(16, 16, 128), Heads(8, 8, 256), Heads(32, 32, 64)]
WIDENED_HEADS = [Heads(16, 16, 128), Heads(32, 32, 64)]
LENGTHS = [4096, 16384]
WRITE_HEADS, WRITE_TOKENS = Heads(32, 8, 128), [8192, 65536]
PREFILL_PAGE = 64
POOL_BYTES = 5 << 30
DTYPE = torch.float8_e4m3fn
TORCH_DTYPES = {"f8e4m3": DTYPE, "i8": torch.int8}
TOLERANCE = 0.06  # relative, in the 2-norm, of results that a peer rounded to 3 bits


def cases(_):
    for heads in DECODE_HEADS:
        for page in (16, 64):
            for scales in ("per_head", "per_token_head"):
                yield from (("decode", "bf16", heads, page, "f8e4m3", scales, name, BATCHES[name]) for name in BATCHES)
    heads = DECODE_HEADS[0]
    for query, dtype, scales in (("bf16", "i8", "per_token_head"), ("f8e4m3", "f8e4m3", "per_head")):
        yield from (("decode", query, heads, 16, dtype, scales, name, BATCHES[name]) for name in BATCHES)
    for heads in PREFILL_HEADS:
        for length in LENGTHS:
            yield from (("prefill", heads, "f8e4m3", length, mask) for mask in ("true", "causal"))
    for heads in WIDENED_HEADS:
        for length in LENGTHS:
            yield from (("prefill", heads, "bf16", length, mask) for mask in ("true", "causal"))
    for tokens in WRITE_TOKENS:
        yield from (("cache write", WRITE_HEADS, tokens, scales) for scales in ("per_head", "per_token_head"))


def rehearsal_cases(_):
    yield "decode", "bf16", Heads(4, 2, 64), 16, "f8e4m3", "per_token_head", "2x64", [64, 64]
    yield "decode", "bf16", Heads(4, 2, 64), 16, "i8", "per_token_head", "2x64", [64, 64]
    yield "prefill", Heads(4, 4, 64), "f8e4m3", 64, "causal"
    yield "prefill", Heads(4, 4, 64), "bf16", 64, "causal"
    yield "cache write", Heads(4, 2, 64), 64, "per_head"


def kinds(case):
    if case[0] == "decode":
        _, query, heads, page, dtype, scales, _, _ = case
        own = Layer(heads, "causal", page, query_dtype=query, kv_dtype=dtype, scales=scales)
        return [own, Layer(heads, "causal", page)]
    if case[0] == "prefill":
        _, heads, dtype, _, mask = case
        own = Layer(heads, mask, PREFILL_PAGE, query_dtype=dtype, kv_dtype="f8e4m3", scales="per_tensor")
        return [own] if dtype == "f8e4m3" else [own, Layer(heads, mask, PREFILL_PAGE)]
    _, heads, _, scales = case
    return [Layer(heads, "causal", ops.PAGE, kv_dtype="f8e4m3", scales=scales)]


def prepare(bench):
    bench.bytes = torch.randint(
        0, 256, (POOL_BYTES if bench.on_gpu else 8 << 20,), dtype=torch.uint8, device=bench.device
    )
    bench.bytes &= FINITE_BITS
    wanted = bench.on_gpu and bench.wants_peer("cuDNN")
    bench.cudnn = bench.optional("cuDNN's FP8", CudnnFloat8) if wanted else None


def finish(bench):
    del bench.bytes


def run(bench, case):
    {"decode": run_decode, "prefill": run_prefill, "cache write": run_cache_write}[case[0]](bench, case)


def scales_of(scales, pages, page, heads, device):
    shape = {"per_tensor": (1,), "per_head": (heads.kv,), "per_token_head": (pages, page, heads.kv)}[scales]
    return torch.rand(shape, device=device) / 16 + 0.03


def run_decode(bench, case):
    _, query_dtype, heads, page, dtype, scales, name, keys = case
    lengths = [(1, length) for length in keys]
    total = num_pages(lengths, page)
    order = np.random.default_rng(2).permutation(total).astype(np.int32)
    pages = torch.from_numpy(order).to(bench.device)
    query = bench.random(len(keys), heads.query, heads.dim)
    out = torch.empty(len(keys), heads.query, heads.value_dim, dtype=query.dtype, device=query.device)
    gigabytes = 1e-9 * sum(keys) * heads.bytes_a_token / 2
    launches = launches_from_memory(bench, gigabytes)
    own, wide = kinds(case)

    def time(kind, caches):
        attention = bench.layers[kind]
        plan = make_plan(attention, lengths, pages=order)
        rows, of_query = query, {}
        if kind == own and query_dtype == "f8e4m3":
            rows, of_query = query.to(DTYPE), {"query_scale": torch.tensor([0.7], device=bench.device)}
        calls = [lambda cache=cache: attention.forward(rows, cache, plan, out, **of_query) for cache in caches]
        return bench.timer.graph(calls, launches)

    shape = (total, page, heads.kv, heads.dim + heads.value_dim)
    size = math.prod(shape)
    count = min(launches, bench.bytes.numel() // size)
    caches = [bench.bytes[i * size : (i + 1) * size].view(shape) for i in range(count)]
    scale = scales_of(scales, total, page, heads, bench.device)

    def eight_bit(cache):
        key, value = (part.view(TORCH_DTYPES[dtype]) for part in views_of(cache, heads))
        return qkv.KvCache(key, value, key_scale=scale, value_scale=scale)

    times = {"qkv": time(own, [eight_bit(cache) for cache in caches])}
    wide_caches = bench.pool.caches(heads, page, total, most=launches)
    times["bf16"] = time(wide, [qkv.KvCache(*views_of(cache, heads)) for cache in wide_caches])
    if bench.page_reader is not None:
        times["loads"] = bench.timer.graph([bench.page_reader.call(cache, pages) for cache in caches], launches)
    micros = {name: time.seconds * 1e6 for name, time in times.items()}
    bench.report.add(
        f"{dtype} decode {name} {heads} page{page} {scales}" + (" e4m3 queries" if query_dtype != "bf16" else ""),
        "GB/s",
        gigabytes / times["qkv"].seconds,
        limit=gigabytes / times["loads"].seconds if "loads" in times else None,
        note=", ".join(f"{name} {value:.2f} us" for name, value in micros.items())
        + f": {micros['bf16'] / micros['qkv']:.2f} x bf16",
        microseconds=micros,
        num_caches=count,
    )


def run_prefill(bench, case):
    _, heads, dtype, length, mask = case
    requests = (16384 if bench.on_gpu else 128) // length
    lengths = [(length, length)] * requests
    shape = (requests, length)
    query, key, value = (
        (bench.random(*shape, h, d) / 2)
        for h, d in ((heads.query, heads.dim), (heads.kv, heads.dim), (heads.kv, heads.value_dim))
    )
    scale = torch.tensor([0.7], device=bench.device)
    flops = 2.0 * length * length * heads.query * (heads.dim + heads.value_dim) * requests
    flops *= 0.5 if mask == "causal" else 1
    order = np.random.default_rng(1).permutation(num_pages(lengths, PREFILL_PAGE)).astype(np.int32)
    own, *wide = kinds(case)
    eight = [tensor.to(DTYPE) for tensor in (query, key, value)]
    rows = (eight[0] if dtype == "f8e4m3" else query).flatten(0, 1)
    scales = {"key_scale": scale, "value_scale": scale}
    of_query = {"query_scale": scale} if dtype == "f8e4m3" else {}
    calls = {"qkv": prefill_call(bench, own, lengths, order, rows, eight[1:], scales, of_query)}
    if wide:
        calls["bf16 cache"] = prefill_call(bench, wide[0], lengths, order, rows, (key, value), {}, {})
    elif bench.cudnn is not None:
        want = calls["qkv"]().clone()
        try:
            peer = bench.cudnn.prefill(*eight, scale, mask == "causal")
            bench.expect_close(
                "cuDNN's FP8", peer().float().reshape(want.shape) * bench.cudnn.out_scale, want, TOLERANCE
            )
            calls["cuDNN FP8"] = peer
        except Exception as error:  # of many kinds: what the peer does not do
            bench.report.leave_out(f"cuDNN's FP8 at d{heads.dim}", error)
    steady = bench.timer.steady(calls)
    rates = {name: flops / time.seconds * 1e-12 for name, time in steady.items()}
    rate = rates.pop("qkv")
    clock = steady["qkv"].clock_mhz
    bench.report.add(
        f"{dtype} queries, prefill {heads} s{length} {'causal' if mask == 'causal' else 'full'} page{PREFILL_PAGE}",
        "TFLOP/s",
        rate,
        rates,
        note=f"{clock:.0f} MHz" if clock else "",
    )


def prefill_call(bench, kind, lengths, order, rows, keys_and_values, scales, scale_of_query):
    attention = bench.layers[kind]
    plan = make_plan(attention, lengths, pages=order)
    cache = qkv.KvCache(*(paged(tensor, order) for tensor in keys_and_values), **scales)
    out = torch.empty(*rows.shape[:2], kind.heads.value_dim, dtype=torch.bfloat16, device=bench.device)

    def call():
        attention.forward(rows, cache, plan, out, **scale_of_query)
        return out

    return call


def paged(tensor, order):
    return in_pages(tensor.view(torch.uint8), order, PREFILL_PAGE).view(tensor.dtype)


def run_cache_write(bench, case):
    _, heads, tokens, scales = case
    attention = bench.layers[kinds(case)[0]]
    plan, pages = ops.write_plan(attention, tokens)
    key, value = (bench.random(tokens, heads.kv, heads.dim) for _ in range(2))
    both = torch.empty(pages, ops.PAGE, heads.kv, 2 * heads.dim, dtype=torch.uint8, device=bench.device).view(DTYPE)
    scale = [scales_of(scales, pages, ops.PAGE, heads, bench.device) for _ in range(2)]
    cache = qkv.KvCache(*views_of(both, heads), key_scale=scale[0], value_scale=scale[1])
    num_bytes = 2 * key.numel() * 3  # 2 in, 1 out

    def call():
        attention.update_cache(key, value, cache, plan)

    ops.add_row(bench, f"fp8 cache write {tokens} tokens {heads} {scales}", call, num_bytes)


class CudnnFloat8:
    """cuDNN's attention of 8-bit floats through its front end: one scale a tensor."""

    out_scale = 1 / 64  # what its outputs are multiplied by to be the results

    def __init__(self, _device):
        import cudnn  # without it prefill has no peer

        self.cudnn = cudnn
        self.handle = cudnn.create_handle()

    def prefill(self, query, key, value, scale, causal):
        """Tensors [requests, tokens, heads, dim]; the call returns [requests, tokens, heads, dim] of e4m3."""
        cudnn = self.cudnn
        graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.FP8_E4M3,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self.handle,
        )
        inputs = [
            tensor.view(torch.uint8).transpose(1, 2) for tensor in (query, key, value)
        ]  # addresses are all it needs
        nodes = [
            graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=cudnn.data_type.FP8_E4M3) for t in inputs
        ]
        # Weights are at most 1: their scale puts them at the format's largest number.
        numbers = [scale, scale, scale, 1 / 448, 448.0, 1 / self.out_scale]
        numbers = [torch.as_tensor(n, dtype=torch.float32, device=query.device).reshape(1, 1, 1, 1) for n in numbers]
        factors = [
            graph.tensor(dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.FLOAT) for _ in numbers
        ]
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        out_node, _, *largest = graph.sdpa_fp8(
            **dict(zip(("q", "k", "v"), nodes, strict=True)),
            **dict(zip(names, factors, strict=True)),
            generate_stats=False,
            attn_scale=query.shape[-1] ** -0.5,
            use_causal_mask=causal,
        )
        out = torch.empty(*query.shape[:3], value.shape[-1], dtype=DTYPE, device=query.device)
        turned = out.view(torch.uint8).transpose(1, 2)
        out_node.set_output(True).set_dim(list(turned.shape)).set_stride(list(turned.stride()))
        pack = dict(zip(nodes + factors, inputs + numbers, strict=True)) | {out_node: turned}
        for node in largest:
            node.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
            node.set_data_type(cudnn.data_type.FLOAT)
            pack[node] = torch.empty(1, 1, 1, 1, device=query.device)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=query.device)

        def call():
            cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream(query.device).cuda_stream)
            graph.execute(pack, workspace, handle=self.handle)
            return out

        return call
