"""Queries, caches and outputs of 8-bit floats: ml_dtypes, torch, and uint8 with a declared type (casebook 122)."""

import numpy as np
import pytest
import qkv
from conftest import DIM, HEADS, KV_HEADS, LENGTHS, PAGE, STARTS, make_paged, spec

ml_dtypes = pytest.importorskip("ml_dtypes")
E4M3 = ml_dtypes.float8_e4m3fn
KEY_SCALE, VALUE_SCALE = (np.array(values, np.float32) for values in ([0.25, 0.015], [0.5, 0.02]))


def quantised(dtype=E4M3):
    """Pages of 8-bit floats with the context's keys and values, and what the new tokens' are."""
    paged = make_paged()
    key_pages = (paged.key_pages / KEY_SCALE[:, None]).astype(dtype)
    value_pages = (paged.value_pages / VALUE_SCALE[:, None]).astype(dtype)
    return paged, key_pages, value_pages


def attention(**changes):
    return qkv.Attention(spec(kv_dtype="f8e4m3", kv_scales="per_head", cache=qkv.CacheSpec(PAGE), **changes))


def run(layer, paged, cache, **arguments):
    plan = layer.plan(paged.batch)
    layer.update_cache(paged.new_key, paged.new_value, cache, plan)
    return layer.forward(paged.query, cache, plan, **arguments)


def test_an_8_bit_cache_agrees_with_the_definition():
    paged, key_pages, value_pages = quantised()
    cache = qkv.KvCache(key_pages, value_pages, key_scale=KEY_SCALE, value_scale=VALUE_SCALE)
    layer = attention()
    out = run(layer, paged, cache)
    exact, _ = qkv.reference.attention(layer.spec, paged.batch, paged.query, cache)
    np.testing.assert_allclose(out, exact, atol=2e-5)
    single = qkv.varlen_attention(
        paged.query, key_pages, value_pages, STARTS, LENGTHS, block_table=paged.block_table, mask="causal",
        key_scale=KEY_SCALE, value_scale=VALUE_SCALE,
    )  # fmt: skip
    np.testing.assert_array_equal(single, out)


def test_uint8_with_a_declared_type_is_the_same_memory():
    paged, key_pages, value_pages = quantised()
    scales = {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE}
    bytes_of_key, bytes_of_value = key_pages.copy().view(np.uint8), value_pages.copy().view(np.uint8)
    named = run(attention(), paged, qkv.KvCache(key_pages, value_pages, **scales))
    declared = run(attention(), paged, qkv.KvCache(bytes_of_key, bytes_of_value, dtype="f8e4m3", **scales))
    np.testing.assert_array_equal(named, declared)
    np.testing.assert_array_equal(bytes_of_key, key_pages.view(np.uint8))


def test_a_wrong_declared_type_is_refused():
    _, key_pages, value_pages = quantised()
    for arrays, dtype, argument in (
        ((key_pages, value_pages), "f8e5m2", "cache.key"),
        ((key_pages.view(np.uint8), value_pages), "f8e5m2", "cache.value"),
        ((key_pages.view(np.uint8), value_pages), None, "cache.key"),
        ((key_pages.astype(np.float32), value_pages), "f8e4m3", "cache.key"),
        ((key_pages, value_pages), "fp8", "dtype"),
    ):
        with pytest.raises(qkv.Error) as caught:
            qkv.KvCache(*arrays, dtype=dtype)
        assert caught.value.argument == argument


def test_scales_of_tokens_are_written_and_must_be_writable():
    paged, key_pages, value_pages = quantised()
    layer = qkv.Attention(spec(kv_dtype="f8e4m3", kv_scales="per_token_head", cache=qkv.CacheSpec(PAGE)))
    key_scale, value_scale = (np.full((len(key_pages), PAGE, KV_HEADS), 0.03, np.float32) for _ in range(2))
    plan = layer.plan(paged.batch)
    key_scale.flags.writeable = False
    cache = qkv.KvCache(key_pages, value_pages, key_scale=key_scale, value_scale=value_scale)
    with pytest.raises(qkv.Error) as caught:
        layer.update_cache(paged.new_key, paged.new_value, cache, plan)
    assert caught.value.argument == "cache.key_scale"
    key_scale.flags.writeable = True
    layer.update_cache(paged.new_key, paged.new_value, cache, plan)
    slots = paged.slot_mapping
    expected = np.abs(paged.new_key).max(axis=-1) / np.float32(448)
    np.testing.assert_array_equal(key_scale.reshape(-1, KV_HEADS)[slots], expected)


def test_8_bit_outputs_are_divided_by_their_scale(paged):
    scale = np.array([0.01], np.float32)
    exact = qkv.varlen_attention(paged.query, paged.key, paged.value, STARTS, LENGTHS)
    out = np.zeros(paged.query.shape, E4M3)
    qkv.varlen_attention(paged.query, paged.key, paged.value, STARTS, LENGTHS, out=out, out_scale=scale)
    np.testing.assert_array_equal(out.view(np.uint8), np.clip(exact / scale, -448, 448).astype(E4M3).view(np.uint8))
    layer = qkv.Attention(spec(output_dtype="f8e4m3", cache=None, mask="true"))
    made = layer.forward(paged.query, paged.key, paged.value, layer.plan(qkv.Batch(STARTS, LENGTHS)), out_scale=scale)
    assert made.dtype == E4M3
    np.testing.assert_array_equal(made.view(np.uint8), out.view(np.uint8))
    as_bytes = np.zeros(paged.query.shape, np.uint8)
    plan = layer.plan(qkv.Batch(STARTS, LENGTHS))
    layer.forward(paged.query, paged.key, paged.value, plan, out=as_bytes, out_scale=scale)
    np.testing.assert_array_equal(as_bytes, out.view(np.uint8))
    lse = np.zeros((HEADS, STARTS[-1]), np.float32)
    merged = qkv.merge_states([(exact, lse)], np.zeros_like(out), out_scale=scale)
    np.testing.assert_array_equal(merged.view(np.uint8), out.view(np.uint8))


def test_8_bit_outputs_choose_a_scale_for_each_group(paged):
    exact = qkv.varlen_attention(paged.query, paged.key, paged.value, STARTS, LENGTHS)
    layer = qkv.Attention(spec(output_dtype="f8e4m3", output_scales="per_token_group", cache=None, mask="true"))
    assert layer.spec.output_scales == "per_token_group"
    scale = np.full((*exact.shape[:2], 1), np.nan, np.float32)
    plan = layer.plan(qkv.Batch(STARTS, LENGTHS))
    out = layer.forward(paged.query, paged.key, paged.value, plan, out_scale=scale)
    largest = np.abs(exact).max(axis=-1, keepdims=True)
    np.testing.assert_array_equal(scale, np.where(largest == 0, np.float32(1), largest / np.float32(448)))
    np.testing.assert_array_equal(out.view(np.uint8), np.clip(exact / scale, -448, 448).astype(E4M3).view(np.uint8))
    again, single = np.full_like(scale, np.nan), np.zeros_like(out)
    qkv.varlen_attention(paged.query, paged.key, paged.value, STARTS, LENGTHS, out=single, out_scale=again)
    np.testing.assert_array_equal(again, scale)
    merged = np.full_like(scale, np.nan)
    qkv.merge_states([(exact, np.zeros((HEADS, STARTS[-1]), np.float32))], np.zeros_like(out), out_scale=merged)
    np.testing.assert_array_equal(merged, scale)
    scale.flags.writeable = False
    with pytest.raises(qkv.Error) as caught:
        layer.forward(paged.query, paged.key, paged.value, plan, out_scale=scale)
    assert caught.value.argument == "out_scale"


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_torch_tensors_are_used_where_they_lie(name):
    torch = pytest.importorskip("torch")
    paged, key_pages, value_pages = quantised(getattr(ml_dtypes, name))
    tensors = [torch.from_numpy(pages.view(np.uint8)).view(getattr(torch, name)) for pages in (key_pages, value_pages)]
    scales = [torch.from_numpy(scale) for scale in (KEY_SCALE, VALUE_SCALE)]
    cache = qkv.KvCache(*tensors, key_scale=scales[0], value_scale=scales[1])
    kv_dtype = {"float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}[name]
    layer = qkv.Attention(
        spec(kv_dtype=kv_dtype, output_dtype=kv_dtype, kv_scales="per_head", cache=qkv.CacheSpec(PAGE))
    )
    plan = layer.plan(paged.batch)
    layer.update_cache(torch.from_numpy(paged.new_key), torch.from_numpy(paged.new_value), cache, plan)
    out_scale = np.array([0.02], np.float32)
    out = layer.forward(torch.from_numpy(paged.query), cache, plan, out_scale=torch.from_numpy(out_scale))
    assert out.dtype == getattr(torch, name)
    exact, _ = qkv.reference.attention(layer.spec, paged.batch, paged.query, cache)
    step = 2.0**-3 if name == "float8_e4m3fn" else 2.0**-2
    np.testing.assert_allclose(out.float().numpy() * out_scale, exact, rtol=step, atol=0.02 * 2.0**-9)


def test_the_flash_attention_wrapper_takes_descales_of_requests_and_heads():
    paged, key_pages, value_pages = quantised()
    qkv.cache_write(
        paged.new_key, paged.new_value,
        qkv.KvCache(key_pages, value_pages, key_scale=KEY_SCALE, value_scale=VALUE_SCALE), paged.slot_mapping,
    )  # fmt: skip
    descales = [np.broadcast_to(scale, (len(LENGTHS), KV_HEADS)) for scale in (KEY_SCALE, VALUE_SCALE)]
    out = qkv.flash_attn_varlen_func(
        paged.query, key_pages, value_pages, 5, STARTS, 11, seqused_k=LENGTHS, block_table=paged.block_table,
        causal=True, k_descale=descales[0], v_descale=descales[1],
    )  # fmt: skip
    expected = qkv.varlen_attention(
        paged.query, key_pages, value_pages, STARTS, LENGTHS, block_table=paged.block_table, mask="causal",
        key_scale=KEY_SCALE, value_scale=VALUE_SCALE,
    )  # fmt: skip
    np.testing.assert_array_equal(out, expected)
    assert out.shape[-1] == DIM


QUERY_SCALE = np.array([0.01, 0.03], np.float32)


def quantised_query(paged, dtype=E4M3):
    heads = np.repeat(QUERY_SCALE, HEADS // KV_HEADS)
    return (paged.query / heads[:, None]).astype(dtype)


@pytest.mark.parametrize(("name", "dtype"), [("f8e4m3", E4M3), ("f8e5m2", ml_dtypes.float8_e5m2)])
def test_8_bit_queries_agree_with_the_definition(name, dtype):
    paged, key_pages, value_pages = quantised()
    cache = qkv.KvCache(key_pages, value_pages, key_scale=KEY_SCALE, value_scale=VALUE_SCALE)
    layer = attention(query_dtype=name, output_dtype="f32")
    query = quantised_query(paged, dtype)
    plan = layer.plan(paged.batch)
    layer.update_cache(paged.new_key, paged.new_value, cache, plan)
    out = layer.forward(query, cache, plan, query_scale=QUERY_SCALE)
    exact, _ = qkv.reference.attention(layer.spec, paged.batch, query, cache, QUERY_SCALE)
    np.testing.assert_allclose(out, exact, atol=2e-5)
    as_bytes = layer.forward(query.view(np.uint8), cache, plan, query_scale=QUERY_SCALE)
    np.testing.assert_array_equal(as_bytes, out)
    single = qkv.varlen_attention(
        query, key_pages, value_pages, STARTS, LENGTHS, block_table=paged.block_table, mask="causal",
        out=np.zeros_like(out), key_scale=KEY_SCALE, value_scale=VALUE_SCALE, query_scale=QUERY_SCALE,
    )  # fmt: skip
    np.testing.assert_array_equal(single, out)


def test_dense_8_bit_queries_make_a_bf16_output(paged):
    layer = qkv.Attention(spec(query_dtype="f8e4m3", cache=None, mask="true"))
    plan = layer.plan(qkv.Batch(STARTS, LENGTHS))
    query = quantised_query(paged)
    out = layer.forward(query, paged.key, paged.value, plan, query_scale=QUERY_SCALE)
    assert out.dtype == ml_dtypes.bfloat16
    single = qkv.varlen_attention(query, paged.key, paged.value, STARTS, LENGTHS, query_scale=QUERY_SCALE)
    np.testing.assert_array_equal(single.view(np.uint16), out.view(np.uint16))
    exact, _ = qkv.reference.attention(
        layer.spec, qkv.Batch(STARTS, LENGTHS), query, paged.key, paged.value, QUERY_SCALE
    )
    np.testing.assert_allclose(out.astype(np.float32), exact, atol=2e-5, rtol=2.0**-8)


def test_dense_keys_and_values_of_8_bits(paged):
    scales = {
        "per_tensor": [np.array([0.25], np.float32), np.array([0.5], np.float32)],
        "per_head": [KEY_SCALE, VALUE_SCALE],
        "per_request_head": [np.linspace(0.1, 0.9, 8).astype(np.float32).reshape(4, 2) * factor for factor in (1, 0.3)],
        "per_token_head": [np.abs(x).max(axis=-1, keepdims=True) / np.float32(448) for x in (paged.key, paged.value)],
    }
    request_of_row = np.repeat(np.arange(4), LENGTHS)
    batch = qkv.Batch(STARTS, LENGTHS)
    for granularity, (key_scale, value_scale) in scales.items():
        spread = {
            "per_tensor": lambda s: s,
            "per_head": lambda s: s[:, None],
            "per_request_head": lambda s: s[request_of_row][:, :, None],
            "per_token_head": lambda s: s,
        }[granularity]
        key = (paged.key / spread(key_scale)).astype(E4M3)
        value = (paged.value / spread(value_scale)).astype(E4M3)
        layer = qkv.Attention(spec(kv_dtype="f8e4m3", cache=None, kv_scales=granularity))
        plan = layer.plan(batch)
        given = {"key_scale": key_scale, "value_scale": value_scale}
        out = layer.forward(paged.query, key, value, plan, **given)
        exact, _ = qkv.reference.attention(layer.spec, batch, paged.query, key, value, **given)
        np.testing.assert_allclose(out, exact, atol=2e-5)
        plain = qkv.Attention(spec(cache=None))
        widened = [x.astype(np.float32) * spread(scale) for x, scale in ((key, key_scale), (value, value_scale))]
        np.testing.assert_allclose(out, plain.forward(paged.query, *widened, plain.plan(batch)), atol=2e-5)
        as_bytes = layer.forward(paged.query, key.view(np.uint8), value.view(np.uint8), plan, **given)
        np.testing.assert_array_equal(as_bytes, out)
        single = qkv.varlen_attention(paged.query, key, value, STARTS, LENGTHS, mask="causal", **given)
        np.testing.assert_array_equal(single, out)
        assert layer.spec.kv_scales == granularity
        with pytest.raises(qkv.Error) as caught:
            layer.forward(paged.query, key, value, plan, key_scale=key_scale)
        assert caught.value.argument == "value_scale"


def test_query_scales_that_do_not_fit_are_refused(paged):
    layer = qkv.Attention(spec(query_dtype="f8e4m3", cache=None, mask="true"))
    plan = layer.plan(qkv.Batch(STARTS, LENGTHS))
    plain = qkv.Attention(spec(cache=None, mask="true"))
    query = quantised_query(paged)
    for attend, arguments in (
        (layer, {}),
        (layer, {"query_scale": np.ones(HEADS, np.float32)}),
        (layer, {"query_scale": QUERY_SCALE * np.float32(0)}),
        (plain, {"query_scale": QUERY_SCALE}),
    ):
        of_layer = query if attend is layer else paged.query
        with pytest.raises(qkv.Error) as caught:
            attend.forward(of_layer, paged.key, paged.value, attend.plan(qkv.Batch(STARTS, LENGTHS)), **arguments)
        assert caught.value.argument.startswith("query_scale")
    with pytest.raises(qkv.Error) as caught:
        layer.forward(paged.query, paged.key, paged.value, plan, query_scale=QUERY_SCALE)
    assert caught.value.argument == "query"


def test_torch_queries_of_8_bits_are_used_where_they_lie(paged):
    torch = pytest.importorskip("torch")
    layer = qkv.Attention(spec(query_dtype="f8e4m3", cache=None, mask="true"))
    plan = layer.plan(qkv.Batch(STARTS, LENGTHS))
    query = quantised_query(paged)
    as_torch = torch.from_numpy(query.view(np.uint8)).view(torch.float8_e4m3fn)
    key, value = torch.from_numpy(paged.key), torch.from_numpy(paged.value)
    out = layer.forward(as_torch, key, value, plan, query_scale=torch.from_numpy(QUERY_SCALE))
    assert out.dtype == torch.bfloat16
    expected = layer.forward(query, paged.key, paged.value, plan, query_scale=QUERY_SCALE)
    np.testing.assert_array_equal(out.view(torch.uint16).numpy(), expected.view(np.uint16))


def test_the_flash_attention_wrapper_takes_descales_of_8_bit_queries():
    paged, key_pages, value_pages = quantised()
    qkv.cache_write(
        paged.new_key, paged.new_value,
        qkv.KvCache(key_pages, value_pages, key_scale=KEY_SCALE, value_scale=VALUE_SCALE), paged.slot_mapping,
    )  # fmt: skip
    query = quantised_query(paged)
    for scale in (QUERY_SCALE, None):
        descales = [
            None if of is None else np.broadcast_to(of, (len(LENGTHS), KV_HEADS))
            for of in (scale, KEY_SCALE, VALUE_SCALE)
        ]
        out = qkv.flash_attn_varlen_func(
            query, key_pages, value_pages, 5, STARTS, 11, seqused_k=LENGTHS, block_table=paged.block_table,
            causal=True, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2],
        )  # fmt: skip
        expected = qkv.varlen_attention(
            query, key_pages, value_pages, STARTS, LENGTHS, block_table=paged.block_table, mask="causal",
            key_scale=KEY_SCALE, value_scale=VALUE_SCALE,
            query_scale=np.ones(1, np.float32) if scale is None else scale,
        )  # fmt: skip
        np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))


def test_rows_are_rounded_with_given_and_with_chosen_scales():
    paged = make_paged()
    rows = np.zeros(paged.query.shape, E4M3)
    scale = np.zeros((len(LENGTHS), KV_HEADS), np.float32)
    starts = np.asarray(STARTS, np.int32)
    qkv.quantise(paged.query, rows, scale, "chosen", query_start_loc=starts)
    groups = np.abs(paged.query).reshape(len(paged.query), KV_HEADS, -1)
    for r in range(len(LENGTHS)):
        largest = groups[starts[r] : starts[r + 1]].max(axis=(0, 2), initial=0)
        np.testing.assert_array_equal(scale[r], np.where(largest > 0, largest / np.float32(448), np.float32(1)))
    given = np.array([0.02, 0.03], np.float32)
    qkv.quantise(paged.query, rows, given, "given")
    np.testing.assert_array_equal(
        rows, (np.clip(paged.query / np.repeat(given, HEADS // KV_HEADS)[:, None], -448, 448)).astype(E4M3)
    )
    with pytest.raises(qkv.Error, match="source"):
        qkv.quantise(paged.query, rows, given, "found")
