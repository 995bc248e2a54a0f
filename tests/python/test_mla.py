"""MLA prefill against numpy: chunks, the whole, the steps, and refusals."""

import itertools
import threading

import numpy as np
import pytest
import qkv

HEADS, NOPE, ROPE, VALUE, RANK, PAGE = 3, 16, 8, 24, 32, 8
CONTEXTS, NEW = [21, 0, 40], [3, 4, 1]


def attention(query, key, value, context):
    """Causal attention of one request's new tokens, in float64."""
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(NOPE + ROPE)
    positions = context + np.arange(query.shape[0])
    scores[:, positions[:, None] < np.arange(key.shape[0])] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value)


class Scene:
    def __init__(self):
        rng = np.random.default_rng(5)
        normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
        self.spec = qkv.MlaSpec(
            num_heads=HEADS, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE, kv_lora_rank=RANK,
            dtype="f32", cache=qkv.CacheSpec(page_size=PAGE),
        )  # fmt: skip
        self.matrix = normal(HEADS * (NOPE + VALUE), RANK) / 4
        self.query = normal(sum(NEW), HEADS, NOPE + ROPE)
        self.new_latents = normal(sum(NEW), RANK + ROPE)
        self.cache = np.full((20, PAGE, RANK + ROPE), np.nan, np.float32)
        self.table = rng.permutation(20)[:18].reshape(3, 6).astype(np.int32)
        self.starts = np.cumsum([0, *NEW]).astype(np.int32)
        self.batch = qkv.Batch(self.starts, np.array(CONTEXTS, np.int32) + np.array(NEW, np.int32), self.table)
        self.expected = np.empty((sum(NEW), HEADS, VALUE))
        self.context = []
        for r, context in enumerate(CONTEXTS):
            rows = normal(context, RANK + ROPE)
            for t in range(context):
                self.cache[self.table[r, t // PAGE], t % PAGE] = rows[t]
            self.context.append(rows)
            new = slice(self.starts[r], self.starts[r + 1])
            key, value = self.expand(np.concatenate([rows, self.new_latents[new]]))
            self.expected[new] = attention(self.query[new], key, value, context)

    def expand(self, latents):
        """Keys, and values as a strided view."""
        wide = (latents[:, :RANK] @ self.matrix.T).reshape(-1, HEADS, NOPE + VALUE)
        rope = np.broadcast_to(latents[:, None, RANK:], (len(latents), HEADS, ROPE))
        return np.concatenate([wide[..., :NOPE], rope], axis=-1), wide[..., NOPE:]


@pytest.fixture
def scene():
    return Scene()


def test_forward_equals_attention_over_all_keys(scene):
    prefill = qkv.MlaPrefill(scene.spec)
    plan = prefill.plan(scene.batch, workspace_tokens=24)
    assert len(plan.chunks) == 3
    assert plan.empty_token_slices == [(3, 7)]
    assert plan.workspace_bytes <= prefill.workspace_bytes(sum(NEW), 24)
    workspace = np.empty(plan.workspace_bytes // 4, np.float32)
    projection = qkv.matrix_projection(scene.spec, scene.matrix)
    out = prefill.forward(scene.query, scene.new_latents, scene.cache, plan, projection, workspace)
    np.testing.assert_allclose(out, scene.expected, atol=1e-5)


def test_latents_and_outputs_of_8_bits(scene):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    e4m3, latent_scale = ml_dtypes.float8_e4m3fn, np.array([0.0137], np.float32)
    bytes_of_cache = (scene.cache / latent_scale).astype(e4m3)
    plain = qkv.MlaPrefill(scene.spec)
    projection = qkv.matrix_projection(scene.spec, scene.matrix)
    sizes = {name: getattr(scene.spec, name) for name in (
        "num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "dtype",
    )}  # fmt: skip
    spec = qkv.MlaSpec(
        **sizes, cache=qkv.CacheSpec(PAGE), cache_dtype="f8e4m3", output_dtype="f8e4m3",
        output_scales="per_token_group",
    )  # fmt: skip
    assert (spec.cache_dtype, spec.output_scales) == ("f8e4m3", "per_token_group")

    def forward(prefill, cache, **arguments):
        plan = prefill.plan(scene.batch, workspace_tokens=24)
        workspace = np.full(plan.workspace_bytes // 4, np.nan, np.float32)
        return prefill.forward(scene.query, scene.new_latents, cache, plan, projection, workspace, **arguments)

    exact = forward(plain, bytes_of_cache.astype(np.float32) * latent_scale)
    prefill = qkv.MlaPrefill(spec)
    over_ranks = qkv.MlaContextParallel(spec, qkv.in_process_ranks(1)[0])
    for layer, cache in itertools.product((prefill, over_ranks), (bytes_of_cache, bytes_of_cache.view(np.uint8))):
        scale = np.full((*exact.shape[:2], 1), np.nan, np.float32)
        out = forward(layer, cache, out_scale=scale, latent_scale=latent_scale)
        np.testing.assert_array_equal(scale[..., 0], np.abs(exact).max(axis=-1) / np.float32(448))
        rounded = np.clip(exact / scale, -448, 448).astype(e4m3)
        np.testing.assert_array_equal(out.view(np.uint8), rounded.view(np.uint8))
    for layer in (prefill, over_ranks):
        with pytest.raises(qkv.Error) as caught:
            forward(layer, bytes_of_cache, out_scale=scale)
        assert caught.value.argument == "latent_scale"


def test_steps_of_the_caller(scene):
    prefill = qkv.MlaPrefill(scene.spec).clone()
    plan = prefill.plan(scene.batch, workspace_tokens=24)
    context_out = np.zeros((sum(NEW), HEADS, VALUE), np.float32)
    context_lse = np.full((HEADS, sum(NEW)), -np.inf, np.float32)
    for chunk in plan.chunks:
        first, last = chunk.requests
        latents = np.empty((chunk.num_context_tokens, RANK + ROPE), np.float32)
        qkv.gather_cache(scene.cache, scene.table[first:last], chunk.starts, chunk.cu_seq_lens, latents)
        key, value = scene.expand(latents)
        begin, end = chunk.tokens
        out = np.empty((end - begin, HEADS, VALUE), np.float32)
        lse = np.empty((HEADS, end - begin), np.float32)
        prefill.run_context_chunk(chunk.index, scene.query[begin:end], key, value, plan, out, lse)
        both = [(context_out[begin:end], context_lse[:, begin:end]), (out, lse)]
        qkv.merge_states(both, context_out[begin:end], context_lse[:, begin:end])
    key, value = scene.expand(scene.new_latents)
    lse = np.empty((HEADS, sum(NEW)), np.float32)
    out = prefill.run_new_tokens(scene.query, key, value, plan, lse=lse)
    prefill.merge_context((context_out, context_lse), (out, lse), plan)
    np.testing.assert_allclose(out, scene.expected, atol=1e-5)


def own_pages(scene, shard):
    """The latents that a rank keeps, on the pages of the whole; NaN everywhere else."""
    pages = np.full_like(scene.cache, np.nan)
    for r, rows in enumerate(scene.context):
        for t in range(len(rows)):
            if shard.rank_of(t) == shard.rank:
                local = shard.local_position(t)
                pages[scene.table[r, local // PAGE], local % PAGE] = rows[t]
    return pages


def run_rank(scene, collectives, exchange, results):
    layer = qkv.MlaContextParallel(scene.spec, collectives, interleave_size=2, exchange=exchange)
    assert layer.shard.num_ranks == 3 and layer.spec.num_heads == HEADS
    plan = layer.plan(scene.batch, workspace_tokens=48)
    assert plan.workspace_bytes <= layer.workspace_bytes(sum(NEW), 48)
    first = 0 if exchange == "all_gather" else collectives.rank * layer.num_heads
    query = np.ascontiguousarray(scene.query[:, first : first + layer.num_heads])
    workspace = np.full(plan.workspace_bytes // 4, np.nan, np.float32)
    projection = qkv.matrix_projection(scene.spec, scene.matrix)
    pages = own_pages(scene, layer.shard)
    results[first, collectives.rank] = layer.forward(query, scene.new_latents, pages, plan, projection, workspace)


@pytest.mark.parametrize("exchange", ["all_to_all", "reduce_scatter", "all_gather"])
def test_ranks_that_exchange_states_equal_attention_over_all_keys(scene, exchange):
    results = {}
    threads = [
        threading.Thread(target=run_rank, args=(scene, collectives, exchange, results))
        for collectives in qkv.in_process_ranks(3, timeout=30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for (first, _), out in results.items():
        np.testing.assert_allclose(out, scene.expected[:, first : first + out.shape[1]], atol=1e-5)


def test_chunks_of_the_worked_example():
    first, second = qkv.plan_context_chunks([0, 3, 8], [65, 96], workspace_tokens=128, page_size=64, num_ranks=4)
    assert first.local_seq_lens.tolist() == [17, 16, 16, 16]
    assert second.local_seq_lens.tolist() == [24, 24, 24, 24]
    assert first.padded_local_cu_seq_lens.tolist() == [0, 17]
    assert second.cu_seq_lens.tolist() == [0, 96]
    assert second.tokens == (3, 8)
    assert second.requests == (1, 2)
    assert qkv.default_workspace_tokens(1001, 8) == 8016


def test_refusals_name_the_argument(scene):
    prefill = qkv.MlaPrefill(scene.spec)
    with pytest.raises(qkv.Error, match="at least 16") as refused:
        prefill.plan(scene.batch, workspace_tokens=8)
    assert refused.value.argument == "workspace_tokens"
    plan = prefill.plan(scene.batch, workspace_tokens=24)
    projection = qkv.matrix_projection(scene.spec, scene.matrix)
    with pytest.raises(qkv.Error, match=str(plan.workspace_bytes)) as refused:
        prefill.forward(scene.query, scene.new_latents, scene.cache, plan, projection, np.empty(8, np.float32))
    assert refused.value.argument == "workspace"
    with pytest.raises(qkv.Error) as refused:
        qkv.MlaPrefill(qkv.MlaSpec(num_heads=1, qk_nope_head_dim=600, v_head_dim=8, kv_lora_rank=8))
    assert refused.value.argument == "qk_nope_head_dim + qk_rope_head_dim"
    assert not qkv.MlaPrefill.supports_dimensions(600, 0, 8)
    assert qkv.MlaPrefill.supports_dimensions(128, 64, 128)
    assert qkv.MlaPrefill.supports_out()
    assert qkv.explain(scene.spec) == []
