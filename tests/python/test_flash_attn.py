"""flash_attn_varlen_func: vLLM's names, order and defaults; what it cannot do is refused by name."""

import inspect

import dense
import numpy as np
import pytest
import qkv
from conftest import HEADS, LENGTHS, STARTS

KEY_STARTS = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)


def call(paged, **changes):
    arguments = {"max_seqlen_q": 5, "cu_seqlens_q": STARTS, "max_seqlen_k": 11, "cu_seqlens_k": KEY_STARTS}
    return qkv.flash_attn_varlen_func(paged.query, paged.key, paged.value, **(arguments | changes))


def expected(paged, visible, **terms):
    return dense.attention(paged.query, paged.key, paged.value, STARTS, LENGTHS, visible, **terms)


def test_argument_order_is_that_of_vllm():
    parameters = inspect.signature(qkv.flash_attn_varlen_func).parameters
    names = " ".join(name for name, parameter in parameters.items() if parameter.kind != parameter.KEYWORD_ONLY)
    assert names == (
        "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v dropout_p softmax_scale causal "
        "window_size softcap alibi_slopes deterministic return_attn_probs block_table return_softmax_lse out "
        "scheduler_metadata q_descale k_descale v_descale num_splits output_scale fa_version s_aux cp_world_size "
        "cp_rank cp_tot_seqused_k mask_mod block_sparse_tensors aux_tensors aux_tensor_leading_dims dynamic_causal"
    )


@pytest.mark.parametrize(
    ("causal", "window", "visible"),
    [
        (False, None, dense.everything),
        (True, None, dense.causal),
        (False, [-1, -1], dense.everything),
        (False, [2, 0], lambda _, q, k: (k <= q) & (q - k <= 2)),
        (False, (3, 2), lambda _, q, k: (q - k <= 3) & (k - q <= 2)),
        (True, [3, 2], lambda _, q, k: (k <= q) & (q - k <= 3)),
        (True, [-1, 4], dense.causal),
        (True, [0, 0], lambda _, q, k: k == q),
    ],
)
def test_causal_and_window_are_masks(paged, causal, window, visible):
    out, lse = call(paged, causal=causal, window_size=window, return_softmax_lse=True)
    exact_out, exact_lse = expected(paged, visible)
    assert isinstance(out, np.ndarray) and lse.shape == (HEADS, STARTS[-1]) and lse.dtype == np.float32
    np.testing.assert_allclose(out, exact_out, atol=2e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=2e-5)


@pytest.mark.parametrize(
    ("keywords", "rest"),
    [
        ({}, dense.everything),
        ({"causal": True}, dense.everything),
        ({"window_size": [2, 0]}, lambda _, q, k: abs(q - k) <= 2),
        ({"window_size": [2, 0], "causal": True}, lambda _, q, k: abs(q - k) <= 2),
        ({"window_size": [3, 1]}, lambda _, q, k: (q - k <= 3) & (k - q <= 1)),
    ],
)
def test_causality_by_request(paged, keywords, rest):
    flags = np.array([1, 0, 0, 5], np.int32)
    left = keywords.get("window_size", [99])[0]

    def visible(r, q, k):
        return (k <= q) & (q - k <= left) if flags[r] else rest(r, q, k)

    out = call(paged, dynamic_causal=flags, **keywords)
    np.testing.assert_allclose(out, expected(paged, visible)[0], atol=2e-5)
    if "causal" not in keywords:
        np.testing.assert_array_equal(call(paged, causal=flags, **keywords), out)


def test_pages_and_all_score_terms_at_once(paged):
    qkv.cache_write(paged.new_key, paged.new_value, qkv.KvCache(paged.key_pages, paged.value_pages), paged.slot_mapping)
    slopes, sinks = np.linspace(0, 0.5, HEADS).astype(np.float32), np.linspace(-1, 1, HEADS).astype(np.float16)
    out = np.empty_like(paged.query)
    result = qkv.flash_attn_varlen_func(
        paged.query, paged.key_pages, paged.value_pages, 5, STARTS, 99, None, LENGTHS, softmax_scale=0.4, causal=True,
        softcap=6.0, alibi_slopes=slopes, s_aux=sinks, block_table=paged.block_table, out=out, num_splits=1,
        q_descale=np.ones((4, 2), np.float32), fa_version=3,
    )  # fmt: skip
    exact, _ = expected(paged, dense.causal, scale=0.4, softcap=6.0, slopes=slopes, sinks=sinks)
    assert result is out
    np.testing.assert_allclose(out, exact, atol=2e-5)


def test_inputs_whose_last_axis_is_not_contiguous_are_copied(paged):
    transposed = np.asfortranarray(paged.query)
    arguments = {"max_seqlen_q": 5, "cu_seqlens_q": STARTS, "max_seqlen_k": 11, "cu_seqlens_k": KEY_STARTS}
    out = qkv.flash_attn_varlen_func(transposed, paged.key, np.asfortranarray(paged.value), **arguments)
    np.testing.assert_array_equal(out, call(paged))


def test_torch_in_torch_out(paged):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).bfloat16() for x in (paged.query, paged.key, paged.value))
    starts, key_starts = torch.from_numpy(STARTS), torch.from_numpy(KEY_STARTS)
    sinks = torch.linspace(-1, 1, HEADS).bfloat16()
    out, lse = qkv.flash_attn_varlen_func(
        q, k, v, 5, starts, 11, key_starts, causal=True, s_aux=sinks, return_softmax_lse=True
    )
    exact, exact_lse = expected(paged, dense.causal, sinks=sinks.float().numpy())
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    np.testing.assert_allclose(out.float().numpy(), exact, atol=5e-2)
    np.testing.assert_allclose(lse.numpy(), exact_lse, atol=5e-2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("q_v", np.zeros(1)),
        ("dropout_p", 0.1),
        ("return_attn_probs", True),
        ("scheduler_metadata", np.zeros(4, np.int32)),
        ("q_descale", np.full((4, 2), 0.5, np.float32)),
        ("k_descale", np.full((4, 2), 0.5, np.float32)),
        ("v_descale", np.full((4, 2), 0.5, np.float32)),
        ("num_splits", 2),
        ("output_scale", np.ones(1, np.float32)),
        ("fa_version", 1),
        ("cp_world_size", 2),
        ("cp_rank", 1),
        ("cp_tot_seqused_k", LENGTHS),
        ("mask_mod", len),
        ("block_sparse_tensors", ()),
        ("aux_tensors", []),
        ("aux_tensor_leading_dims", []),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(paged, name, value):
    with pytest.raises(qkv.Error) as caught:
        call(paged, **{name: value})
    assert (caught.value.code, caught.value.argument) == ("unsupported", name)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"seqused_k": LENGTHS}, "cu_seqlens_k and seqused_k"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k and seqused_k"),
        ({"cu_seqlens_k": None, "seqused_k": LENGTHS}, "block_table"),
        ({"block_table": np.zeros((4, 3), np.int32)}, "block_table"),
        ({"window_size": [1]}, "window_size"),
        ({"max_seqlen_q": 4}, "max_seqlen_q"),
        ({"max_seqlen_k": 10}, "max_seqlen_k"),
        ({"cu_seqlens_k": KEY_STARTS + 1}, "cu_seqlens_k"),
        ({"cu_seqlens_k": KEY_STARTS.astype(np.int64)}, "cu_seqlens_k"),
        ({"cu_seqlens_q": STARTS.tolist()}, "cu_seqlens_q"),
        ({"causal": STARTS[:4], "dynamic_causal": STARTS[:4]}, "causal"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused_by_name(paged, changes, name):
    with pytest.raises(qkv.Error) as caught:
        call(paged, **changes)
    assert caught.value.argument == name


@pytest.mark.parametrize("causal", [[0, 0], (False, False), "False", 0.5])
def test_causal_is_a_bool_or_a_tensor(causal):
    ones, starts = np.ones((1, 2, 16), np.float32), np.array([0, 1], np.int32)
    with pytest.raises(qkv.Error) as refused:
        qkv.flash_attn_varlen_func(ones, ones, ones, 1, starts, 1, cu_seqlens_k=starts, causal=causal)
    assert refused.value.argument == "causal"


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_flags_of_requests_are_bools_or_int32(dtype):
    ones, starts = np.ones((1, 2, 16), np.float32), np.array([0, 1], np.int32)
    flags = np.ones(1, dtype)
    with pytest.raises(qkv.Error) as refused:
        qkv.flash_attn_varlen_func(ones, ones, ones, 1, starts, 1, cu_seqlens_k=starts, dynamic_causal=flags)
    assert refused.value.argument == "dynamic_causal"
