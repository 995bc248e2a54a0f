"""plan, update_cache and forward against a numpy definition."""

import threading
import time

import dense
import numpy as np
import pytest
import qkv
from conftest import DIM, HEADS, KV_HEADS, LENGTHS, PAGE, STARTS, DlpackOnly, make_paged, spec


def run(paged, layer, cache=None, **outputs):
    attention = qkv.Attention(layer)
    cache = cache or qkv.KvCache(paged.key_pages, paged.value_pages)
    plan = attention.plan(paged.batch)
    attention.update_cache(paged.new_key, paged.new_value, cache, plan)
    return attention.forward(paged.query, cache, plan, **outputs)


def expected(paged, visible=dense.causal, **terms):
    return dense.attention(paged.query, paged.key, paged.value, STARTS, LENGTHS, visible, **terms)


def test_paged_causal_step_matches_the_definition(paged):
    lse = np.zeros((HEADS, STARTS[-1]), np.float32)
    out = run(paged, spec(), lse=lse)
    exact_out, exact_lse = expected(paged)
    assert isinstance(out, np.ndarray) and out.dtype == np.float32
    np.testing.assert_allclose(out, exact_out, atol=2e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=2e-5)


def test_score_terms_and_mask_text_reach_the_engine(paged):
    slopes, sinks = np.linspace(0.1, 0.6, HEADS), np.linspace(-1, 1, HEADS)
    layer = spec(mask="causal & window(3, 0)", scale=0.3, softcap=5.0, alibi_slopes=slopes, sinks=list(sinks))
    exact, _ = expected(
        paged, lambda _, q, k: (k <= q) & (q - k <= 3), scale=0.3, softcap=5.0, slopes=slopes, sinks=sinks
    )
    np.testing.assert_allclose(run(paged, layer), exact, atol=2e-5)
    assert layer.mask == qkv.parse_mask("causal & window(3, 0)")
    assert layer.softcap == 5.0 and layer.head_dim_v == DIM and "CacheSpec(page_size=4)" in repr(layer)


def test_mask_operands_come_with_the_batch(paged):
    prefix = np.array([2, 4, 0, 1], np.int32)
    batch = qkv.Batch(
        STARTS, LENGTHS, paged.block_table, paged.slot_mapping, mask_operands={"prefix_len": prefix, "unused": prefix}
    )
    paged.batch = batch
    exact, _ = expected(paged, lambda r, q, k: (k <= q) & ((k < prefix[r]) | (q - k < 3)))
    np.testing.assert_allclose(run(paged, spec(mask=qkv.mask.rswa(3))), exact, atol=2e-5)


def test_reference_is_the_same_definition(paged):
    cache = qkv.KvCache(paged.key_pages, paged.value_pages)
    qkv.cache_write(paged.new_key, paged.new_value, cache, paged.slot_mapping)
    out, lse = qkv.reference.attention(spec(), paged.batch, paged.query, cache)
    exact_out, exact_lse = expected(paged)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, exact_out, atol=1e-6)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-6)


def test_out_is_written_in_place_and_returned(paged):
    out = np.full((STARTS[-1] + 2, HEADS, DIM), 7, np.float32)
    assert run(paged, spec(), out=out) is out
    np.testing.assert_allclose(out[:-2], expected(paged)[0], atol=2e-5)
    assert (out[-2:] == 7).all()  # rows past the batch's tokens


def test_out_may_be_a_strided_view(paged):
    storage = np.full((HEADS, STARTS[-1], 2 * DIM), 7, np.float32)
    run(paged, spec(), out=storage.transpose(1, 0, 2)[:, :, :DIM])
    np.testing.assert_allclose(storage.transpose(1, 0, 2)[:, :, :DIM], expected(paged)[0], atol=2e-5)
    assert (storage[:, :, DIM:] == 7).all()


def test_interleaved_cache_is_used_where_it_lies(paged):
    key_value = np.full((16, KV_HEADS, PAGE, 2 * DIM), np.nan, np.float32)
    views = key_value.transpose(0, 2, 1, 3)
    views[..., :DIM], views[..., DIM:] = paged.key_pages, paged.value_pages
    out = run(paged, spec(), qkv.KvCache.from_interleaved(key_value, DIM))
    np.testing.assert_allclose(out, expected(paged)[0], atol=2e-5)
    page, offset = divmod(int(paged.slot_mapping[0]), PAGE)
    np.testing.assert_array_equal(views[page, offset, :, :DIM], paged.new_key[0])
    np.testing.assert_array_equal(views[page, offset, :, DIM:], paged.new_value[0])


def test_dense_layers_take_keys_and_values(paged):
    attention = qkv.Attention(spec(cache=None))
    plan = attention.plan(qkv.Batch(STARTS, LENGTHS))
    out = attention.forward(paged.query, paged.key, paged.value, plan)
    np.testing.assert_allclose(out, expected(paged)[0], atol=2e-5)
    exact, _ = qkv.reference.attention(attention.spec, qkv.Batch(STARTS, LENGTHS), paged.query, paged.key, paged.value)
    np.testing.assert_allclose(out, exact, atol=2e-5)


def test_encoder_layers_see_everything_without_seq_lens():
    rng = np.random.default_rng(3)
    starts = np.array([0, 4, 7], np.int32)
    query, key, value = (rng.standard_normal((7, heads, DIM), np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    attention = qkv.Attention(spec(cache=None, type="encoder_only"))
    out = attention.forward(query, key, value, attention.plan(qkv.Batch(starts)))
    exact, _ = dense.attention(query, key, value, starts, [4, 3], dense.everything)
    np.testing.assert_allclose(out, exact, atol=2e-5)


def test_half_precision_arrays_keep_their_dtype():
    half = make_paged(np.float16)
    out = run(half, spec(query_dtype="f16", kv_dtype="f16"))
    assert out.dtype == np.float16
    np.testing.assert_allclose(out.astype(np.float64), expected(half)[0], atol=5e-3)


def test_bfloat16_arrays_of_ml_dtypes_keep_their_dtype():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    brain = make_paged(bfloat16)
    out = run(brain, spec(query_dtype="bf16", kv_dtype="bf16"))
    assert out.dtype == bfloat16
    np.testing.assert_allclose(out.astype(np.float64), expected(brain)[0], atol=4e-2)


def test_bfloat16_views_are_written_without_a_copy():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    brain = make_paged(bfloat16)
    storage = np.zeros((HEADS, STARTS[-1], DIM), bfloat16)
    run(brain, spec(query_dtype="bf16", kv_dtype="bf16"), out=storage.transpose(1, 0, 2))
    exact = expected(brain)[0].transpose(1, 0, 2)
    np.testing.assert_allclose(storage.astype(np.float64), exact, atol=4e-2)


def test_any_object_with_dlpack_is_a_tensor(paged):
    attention = qkv.Attention(spec())
    cache = qkv.KvCache(DlpackOnly(paged.key_pages), DlpackOnly(paged.value_pages))
    batch = qkv.Batch(*map(DlpackOnly, (STARTS, LENGTHS, paged.block_table, paged.slot_mapping)))
    plan = attention.plan(batch)
    attention.update_cache(DlpackOnly(paged.new_key), DlpackOnly(paged.new_value), cache, plan)
    out = np.zeros_like(paged.query)
    attention.forward(DlpackOnly(paged.query), cache, plan, DlpackOnly(out))
    np.testing.assert_allclose(out, expected(paged)[0], atol=2e-5)
    made = attention.forward(DlpackOnly(paged.query), cache, plan)
    np.testing.assert_array_equal(made, out)


def test_torch_tensors_come_back_as_torch(paged):
    torch = pytest.importorskip("torch")
    query = torch.from_numpy(paged.query).bfloat16()
    layer = spec(query_dtype="bf16")
    attention = qkv.Attention(layer)
    cache = qkv.KvCache(torch.from_numpy(paged.key_pages), torch.from_numpy(paged.value_pages))
    plan = attention.plan(paged.batch)
    attention.update_cache(torch.from_numpy(paged.new_key), torch.from_numpy(paged.new_value), cache, plan)
    out = attention.forward(query, cache, plan)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
    np.testing.assert_allclose(out.float().numpy(), expected(paged)[0], atol=5e-2)


def test_read_only_inputs_are_accepted(paged):
    for array in (paged.query, paged.new_key, paged.new_value, paged.block_table, paged.slot_mapping):
        array.flags.writeable = False
    np.testing.assert_allclose(run(paged, spec()), expected(paged)[0], atol=2e-5)


def test_a_read_only_cache_may_be_read_but_not_updated(paged):
    attention = qkv.Attention(spec())
    plan = attention.plan(paged.batch)
    cache = qkv.KvCache(paged.key_pages, paged.value_pages)
    attention.update_cache(paged.new_key, paged.new_value, cache, plan)
    paged.value_pages.flags.writeable = False
    np.testing.assert_allclose(attention.forward(paged.query, cache, plan), expected(paged)[0], atol=2e-5)
    with pytest.raises(qkv.Error) as caught:
        attention.update_cache(paged.new_key, paged.new_value, cache, plan)
    assert (caught.value.argument, caught.value.value) == ("cache.value", "a read-only array")


def test_a_plan_keeps_nothing_of_the_batch(paged):
    attention = qkv.Attention(spec())
    starts, lengths, table = STARTS.copy(), LENGTHS.copy(), paged.block_table.copy()
    plan = attention.plan(qkv.Batch(starts, lengths, table, paged.slot_mapping))
    starts[:], lengths[:], table[:] = 0, 0, 0
    cache = qkv.KvCache(paged.key_pages, paged.value_pages)
    attention.update_cache(paged.new_key, paged.new_value, cache, plan)
    np.testing.assert_allclose(attention.forward(paged.query, cache, plan), expected(paged)[0], atol=2e-5)
    assert (plan.num_requests, plan.num_tokens) == (4, 9)
    assert plan.num_work_items >= 1 and plan.workspace_bytes >= 0 and plan.dump()


def test_arrays_of_a_batch_and_a_cache_stay_alive():
    held = make_paged()
    exact, query, new_key, new_value = expected(held)[0], held.query, held.new_key, held.new_value
    cache, batch = qkv.KvCache(held.key_pages, held.value_pages), held.batch
    del held
    np.full((16, PAGE, KV_HEADS, DIM), 9, np.float32)  # would take the memory of a cache that was let go
    attention = qkv.Attention(spec())
    plan = attention.plan(batch)
    attention.update_cache(new_key, new_value, cache, plan)
    np.testing.assert_allclose(attention.forward(query, cache, plan), exact, atol=2e-5)


def test_other_threads_run_during_forward():
    rng = np.random.default_rng(1)
    attention = qkv.Attention(qkv.LayerSpec(num_q_heads=4, num_kv_heads=4, head_dim=128))
    plan = attention.plan(qkv.Batch(np.array([0, 2048], np.int32), np.array([2048], np.int32)))
    query, key, value = (rng.standard_normal((2048, 4, 128), np.float32) for _ in range(3))
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.0005):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    began = time.perf_counter()
    attention.forward(query, key, value, plan)
    seconds = time.perf_counter() - began
    done.set()
    ticker.join()
    # The middle of the call: at its ends the interpreter may hand over in any case.
    assert any(began + seconds / 4 < moment < began + seconds * 3 / 4 for moment in ticks)


def test_explain_and_create_agree():
    bad = qkv.LayerSpec(num_q_heads=6, num_kv_heads=4, head_dim=16)
    reasons = qkv.explain(bad)
    assert len(reasons) == 1 and "num_kv_heads" in reasons[0]
    with pytest.raises(qkv.Error):
        qkv.Attention(bad)
    assert qkv.explain(spec()) == []
    assert "bf16" in qkv.support_matrix()


def test_threads_do_not_change_the_result(paged):
    qkv.set_num_threads(1)
    one = run(paged, spec())
    assert qkv.num_threads() == 1
    qkv.set_num_threads(2)
    two = run(paged, spec())
    qkv.set_num_threads(0)
    np.testing.assert_array_equal(one, two)


def test_info_names_what_runs():
    assert qkv.instruction_set_in_use() in qkv.instruction_sets()
    assert qkv.__version__ == qkv.version() and qkv.version() in qkv.info()


def test_prefix_groups_are_checked_and_change_no_bit():
    spec = qkv.LayerSpec(num_q_heads=4, num_kv_heads=1, head_dim=16, cache=qkv.CacheSpec(page_size=16))
    rng = np.random.default_rng(5)
    starts, lengths = np.arange(4, dtype=np.int32), np.array([1200, 1100, 1300], np.int32)
    table = np.arange(3 * 82, dtype=np.int32).reshape(3, 82)
    table[1:, :64] = table[0, :64]  # 1024 keys: two splits
    cache = qkv.KvCache(*(rng.standard_normal((3 * 82, 16, 1, 16)).astype(np.float32) for _ in range(2)))
    query = rng.standard_normal((3, 4, 16)).astype(np.float32)
    attention = qkv.Attention(spec)

    def run(**sharing):
        plan = attention.plan(qkv.Batch(starts, lengths, table, **sharing))
        return plan, attention.forward(query, cache, plan)

    apart, expected = run(prefix_sharing="off")
    shared, out = run(prefix_groups=[([2, 0, 1], 1024)], prefix_sharing="always")
    assert shared.num_work_items < apart.num_work_items
    assert "3 requests from 2 on share 1024 keys" in shared.dump()
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(qkv.Error, match=r"prefix_groups\[0\].num_tokens: got 1100; allowed: at most 1099"):
        run(prefix_groups=[([0, 1], 1100)])
    with pytest.raises(qkv.Error, match="prefix_sharing"):
        run(prefix_sharing="maybe")


def test_a_planner_takes_the_place_of_its_plan_before(paged):
    attention = qkv.Attention(spec())
    num_tokens, num_pages = len(paged.new_key), len(paged.key_pages)
    planner = attention.planner(max_requests=4, max_tokens=num_tokens, max_seq_len=200, num_pages=num_pages)
    first = planner.plan(paged.batch)
    second = planner.plan(paged.batch)
    cache = qkv.KvCache(paged.key_pages, paged.value_pages)
    attention.update_cache(paged.new_key, paged.new_value, cache, second)
    np.testing.assert_allclose(attention.forward(paged.query, cache, second), expected(paged)[0], atol=2e-5)
    with pytest.raises(qkv.Error) as caught:
        attention.forward(paged.query, cache, first)
    assert caught.value.argument == "plan"
    assert attention.workspace_bytes(max_requests=4, max_tokens=9, max_seq_len=200, num_pages=num_pages) >= 0
    with pytest.raises(qkv.Error) as caught:
        attention.planner(max_requests=3, max_tokens=9, max_seq_len=200, num_pages=num_pages).plan(paged.batch)
    assert caught.value.argument == "query_start_loc: requests"


def test_empty_arrays_whose_strides_are_zero():
    """As numpy has them since version 2.4."""

    def empty(*shape, dtype=np.float32):
        return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, (0,) * len(shape))

    attention = qkv.Attention(spec(cache=None))
    plan = attention.plan(qkv.Batch(np.array([0], np.int32), np.array([], np.int32)))
    out, lse = empty(0, HEADS, DIM), empty(HEADS, 0)
    keys = empty(0, KV_HEADS, DIM)
    assert attention.forward(empty(0, HEADS, DIM), keys, keys, plan, out=out, lse=lse).shape == (0, HEADS, DIM)
    qkv.merge_states([(out, lse), (out, lse)], empty(0, HEADS, DIM), empty(HEADS, 0))
