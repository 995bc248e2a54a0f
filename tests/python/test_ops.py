"""The single calls: varlen_attention, merge_states, lse_from_lse2, cache_write."""

import dense
import numpy as np
import pytest
import qkv
from conftest import DIM, HEADS, KV_HEADS, LENGTHS, PAGE, STARTS


def test_varlen_attention_over_dense_keys(paged):
    lse = np.zeros((HEADS, STARTS[-1]), np.float32)
    out = qkv.varlen_attention(paged.query, paged.key, paged.value, STARTS, LENGTHS, mask=qkv.mask.causal(), lse=lse)
    exact_out, exact_lse = dense.attention(paged.query, paged.key, paged.value, STARTS, LENGTHS, dense.causal)
    np.testing.assert_allclose(out, exact_out, atol=2e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=2e-5)


def test_varlen_attention_over_pages_with_all_score_terms(paged):
    qkv.cache_write(paged.new_key, paged.new_value, qkv.KvCache(paged.key_pages, paged.value_pages), paged.slot_mapping)
    rng = np.random.default_rng(2)
    slopes, sinks = rng.random((len(LENGTHS), HEADS), np.float32), rng.random(HEADS, np.float32)
    out = np.zeros_like(paged.query)
    result = qkv.varlen_attention(
        paged.query, paged.key_pages, paged.value_pages, STARTS, LENGTHS, block_table=paged.block_table,
        mask="window(3, 1)", scale=0.5, softcap=4.0, alibi_slopes=slopes, sinks=sinks, out=out,
    )  # fmt: skip
    exact, _ = dense.attention(
        paged.query, paged.key, paged.value, STARTS, LENGTHS, lambda _, q, k: (q - k <= 3) & (k - q <= 1),
        scale=0.5, softcap=4.0, slopes=slopes, sinks=sinks,
    )  # fmt: skip
    assert result is out
    np.testing.assert_allclose(out, exact, atol=2e-5)


def test_varlen_attention_without_a_mask_sees_everything(paged):
    out = qkv.varlen_attention(paged.query, paged.key, paged.value, STARTS, LENGTHS)
    exact, _ = dense.attention(paged.query, paged.key, paged.value, STARTS, LENGTHS, dense.everything)
    np.testing.assert_allclose(out, exact, atol=2e-5)


def test_merged_halves_are_the_whole(paged):
    states = []
    for text in ("kv_pos < 3", "kv_pos >= 3"):
        lse = np.zeros((HEADS, STARTS[-1]), np.float32)
        mask = qkv.parse_mask(f"causal & {text}")
        states.append(
            (qkv.varlen_attention(paged.query, paged.key, paged.value, STARTS, LENGTHS, mask=mask, lse=lse), lse)
        )
    lse = np.zeros_like(states[0][1])
    out = qkv.merge_states(states, lse=lse)
    exact_out, exact_lse = dense.attention(paged.query, paged.key, paged.value, STARTS, LENGTHS, dense.causal)
    np.testing.assert_allclose(out, exact_out, atol=2e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=2e-5)


def test_an_empty_state_spreads_no_nan_and_out_may_be_a_state():
    rng = np.random.default_rng(5)
    full = (rng.standard_normal((3, 2, 8), np.float32), rng.standard_normal((2, 3), np.float32))
    empty = (np.full((3, 2, 8), np.nan, np.float32), np.full((2, 3), -np.inf, np.float32))
    before = full[0].copy()
    assert qkv.merge_states([empty, full], full[0], full[1]) is full[0]
    np.testing.assert_array_equal(full[0], before)


def test_merge_states_names_the_state_that_is_no_tensor():
    state = (np.zeros((3, 2, 8), np.float32), np.zeros((2, 3), np.float32))
    with pytest.raises(qkv.Error) as caught:
        qkv.merge_states([state, (state[0], "lse")])
    assert caught.value.argument == "states[1].lse"
    with pytest.raises(qkv.Error) as caught:
        qkv.merge_states([])
    assert caught.value.argument == "states"


def test_lse_changes_its_base_in_place():
    lse = np.array([[1.0, -np.inf, 3.0]], np.float32)
    qkv.lse_from_lse2(lse)
    np.testing.assert_allclose(lse, [[np.log(2), -np.inf, 3 * np.log(2)]], rtol=1e-6)


def test_cache_write_skips_slot_minus_one():
    pages = np.zeros((2, PAGE, KV_HEADS, DIM), np.float32)
    key = np.arange(2 * KV_HEADS * DIM, dtype=np.float32).reshape(2, KV_HEADS, DIM) + 1
    qkv.cache_write(key, -key, qkv.KvCache(pages[:1], pages[1:]), np.array([-1, 2], np.int64))
    np.testing.assert_array_equal(pages[0, 2], key[1])
    np.testing.assert_array_equal(pages[1, 2], -key[1])
    assert np.count_nonzero(pages) == 2 * KV_HEADS * DIM
