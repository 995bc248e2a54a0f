"""Caches of int8, a dtype that numpy and torch know: what is written is rounded to even; all else stays a float."""

import numpy as np
import pytest
import qkv
from conftest import KV_HEADS, LENGTHS, PAGE, STARTS, make_paged, spec

KEY_SCALE, VALUE_SCALE = (np.array(values, np.float32) for values in ([0.02, 0.015], [0.031, 0.024]))


def rounded(rows, scale):
    return np.clip(np.rint(np.nan_to_num(rows / scale[:, None])), -128, 127).astype(np.int8)


def quantised():
    """Pages of int8 with the context's keys and values, and what the new tokens' are."""
    paged = make_paged()
    return paged, rounded(paged.key_pages, KEY_SCALE), rounded(paged.value_pages, VALUE_SCALE)


def attention(**changes):
    return qkv.Attention(spec(**({"kv_dtype": "i8", "kv_scales": "per_head", "cache": qkv.CacheSpec(PAGE)} | changes)))


def test_an_int8_cache_is_written_rounded_and_agrees_with_the_definition():
    paged, key_pages, value_pages = quantised()
    cache = qkv.KvCache(key_pages, value_pages, key_scale=KEY_SCALE, value_scale=VALUE_SCALE)
    layer = attention()
    assert layer.spec.kv_dtype == "i8"
    plan = layer.plan(paged.batch)
    layer.update_cache(paged.new_key, paged.new_value, cache, plan)
    written = key_pages.reshape(-1, *key_pages.shape[2:])[paged.slot_mapping]
    np.testing.assert_array_equal(written, rounded(paged.new_key, KEY_SCALE))
    out = layer.forward(paged.query, cache, plan)
    exact, _ = qkv.reference.attention(layer.spec, paged.batch, paged.query, cache)
    np.testing.assert_allclose(out, exact, atol=2e-5)
    single = qkv.varlen_attention(
        paged.query, key_pages, value_pages, STARTS, LENGTHS, block_table=paged.block_table, mask="causal",
        key_scale=KEY_SCALE, value_scale=VALUE_SCALE,
    )  # fmt: skip
    np.testing.assert_array_equal(single, out)
    descales = [np.broadcast_to(scale, (len(LENGTHS), KV_HEADS)) for scale in (KEY_SCALE, VALUE_SCALE)]
    wrapped = qkv.flash_attn_varlen_func(
        paged.query, key_pages, value_pages, 5, STARTS, 11, seqused_k=LENGTHS, block_table=paged.block_table,
        causal=True, k_descale=descales[0], v_descale=descales[1],
    )  # fmt: skip
    np.testing.assert_array_equal(wrapped, out)


def test_torch_tensors_are_used_where_they_lie():
    torch = pytest.importorskip("torch")
    paged, key_pages, value_pages = quantised()
    scales = [np.full((len(key_pages), PAGE, KV_HEADS), size, np.float32) for size in (0.02, 0.03)]
    cache = qkv.KvCache(
        torch.from_numpy(key_pages), torch.from_numpy(value_pages),
        key_scale=torch.from_numpy(scales[0]), value_scale=torch.from_numpy(scales[1]),
    )  # fmt: skip
    layer = attention(kv_scales="per_token_head")
    plan = layer.plan(paged.batch)
    layer.update_cache(torch.from_numpy(paged.new_key), torch.from_numpy(paged.new_value), cache, plan)
    chosen = np.abs(paged.new_key).max(axis=-1) / np.float32(127)
    np.testing.assert_array_equal(scales[0].reshape(-1, KV_HEADS)[paged.slot_mapping], chosen)
    out = layer.forward(torch.from_numpy(paged.query), cache, plan)
    exact, _ = qkv.reference.attention(layer.spec, paged.batch, paged.query, cache)
    np.testing.assert_allclose(out.numpy(), exact, atol=2e-5)


def test_uint8_is_no_int8_and_only_keys_and_values_are():
    paged, key_pages, value_pages = quantised()
    for pages in ((key_pages.view(np.uint8), value_pages), (key_pages, value_pages.view(np.uint8))):
        with pytest.raises(qkv.Error) as caught:
            qkv.KvCache(*pages, dtype="i8")
        assert caught.value.argument == ("cache.key" if pages[0].dtype == np.uint8 else "cache.value")
    for field in ("query_dtype", "output_dtype"):
        with pytest.raises(qkv.Error, match=rf"{field}: got i8; .*only keys and values are of i8"):
            attention(**{field: "i8"})
    with pytest.raises(qkv.Error) as caught:
        qkv.varlen_attention(key_pages[:, 0], paged.key, paged.value, STARTS, LENGTHS)
    assert "i8" in str(caught.value)
