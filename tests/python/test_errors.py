"""Refusals: the four fields, and the argument's own name."""

import pickle

import numpy as np
import pytest
import qkv
from conftest import DlpackOnly, spec


def refusal(call, *arguments, **keywords):
    with pytest.raises(qkv.Error) as caught:
        call(*arguments, **keywords)
    return caught.value


def test_error_is_a_value_error_with_four_fields(paged):
    batch = qkv.Batch(np.array([0, 3, 2], np.int32), np.array([3, 3], np.int32), paged.block_table)
    error = refusal(qkv.Attention(spec()).plan, batch)
    assert isinstance(error, ValueError)
    assert error.code == "invalid_argument"
    assert "query_start_loc" in error.argument
    assert error.value and error.allowed
    assert str(error) == f"{error.argument}: got {error.value}; allowed: {error.allowed}"


def test_error_survives_pickling():
    error = qkv.Error("mismatch", "plan", "of another layer", "its own")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, copy.argument, copy.value, copy.allowed) == ("mismatch", "plan", "of another layer", "its own")


@pytest.mark.parametrize("wrong", [[0, 1], "text", 3, object()])
def test_what_is_no_tensor_is_refused_by_name(paged, wrong):
    attention = qkv.Attention(spec())
    cache, plan = qkv.KvCache(paged.key_pages, paged.value_pages), attention.plan(paged.batch)
    assert refusal(qkv.Batch, wrong).argument == "query_start_loc"
    assert refusal(qkv.Batch, paged.block_table[0], wrong).argument == "seq_lens"
    assert refusal(attention.forward, wrong, cache, plan).argument == "query"
    assert refusal(attention.forward, paged.query, cache, plan, lse=wrong).argument == "lse"
    assert refusal(attention.update_cache, paged.new_key, wrong, cache, plan).argument == "value"
    assert refusal(qkv.KvCache, paged.key_pages, wrong).argument == "cache.value"
    assert refusal(qkv.KvCache.from_interleaved, wrong, 16).argument == "key_value"
    assert refusal(qkv.lse_from_lse2, wrong).argument == "lse"
    assert type(wrong).__name__ in refusal(qkv.Batch, wrong).value


def test_dtypes_are_refused_by_the_arguments_name(paged):
    attention = qkv.Attention(spec())
    cache, plan = qkv.KvCache(paged.key_pages, paged.value_pages), attention.plan(paged.batch)
    error = refusal(attention.forward, paged.query.astype(np.float64), cache, plan)
    assert error.argument == "query" and "float32" in error.allowed
    error = refusal(attention.forward, paged.query.astype(np.float16), cache, plan)
    assert error.argument == "query" and "f16" in error.value


def test_read_only_outputs_are_refused_by_name(paged):
    attention = qkv.Attention(spec())
    cache, plan = qkv.KvCache(paged.key_pages, paged.value_pages), attention.plan(paged.batch)
    out, lse = np.zeros_like(paged.query), np.zeros(paged.query.shape[1::-1], np.float32)
    out.flags.writeable = lse.flags.writeable = False
    assert refusal(attention.forward, paged.query, cache, plan, out).argument == "out"
    error = refusal(attention.forward, paged.query, cache, plan, lse=lse)
    assert (error.argument, error.value) == ("lse", "a read-only array")


def test_unknown_words_are_refused_with_the_known_ones():
    assert refusal(spec, query_dtype="float32").argument == "query_dtype"
    assert '"bf16"' in refusal(spec, kv_dtype="bfloat16").allowed
    assert '"encoder_only"' in refusal(spec, type="bert").allowed
    assert refusal(qkv.Attention, spec(), device="tpu").argument == "device"
    assert refusal(qkv.explain, spec(), device="cuda:x").argument == "device"
    assert '"new_key"' in refusal(qkv.mask.operand, "tag", "token").allowed


def test_a_plan_of_another_kind_of_layer_is_refused(paged):
    plan = qkv.Attention(spec(softcap=3.0)).plan(paged.batch)
    cache = qkv.KvCache(paged.key_pages, paged.value_pages)
    error = refusal(qkv.Attention(spec(mask="everything")).forward, paged.query, cache, plan)
    assert (error.code, error.argument) == ("mismatch", "plan")


def test_tensors_whose_memory_does_not_say_all_are_refused(paged):
    attention = qkv.Attention(spec())
    cache, plan = qkv.KvCache(paged.key_pages, paged.value_pages), attention.plan(paged.batch)
    wants_gradient, is_negated = DlpackOnly(paged.query), DlpackOnly(paged.query)
    wants_gradient.requires_grad, is_negated.requires_grad = True, False
    is_negated.is_neg = lambda: True
    error = refusal(attention.forward, wants_gradient, cache, plan)
    assert error.argument == "query" and "gradient" in error.value and "detach" in error.allowed
    error = refusal(attention.forward, is_negated, cache, plan)
    assert error.argument == "query" and "negated" in error.value


def test_dtypes_have_their_names(paged):
    attention = qkv.Attention(spec())
    cache, plan = qkv.KvCache(paged.key_pages, paged.value_pages), attention.plan(paged.batch)
    assert "float64" in refusal(attention.forward, paged.query.astype(np.float64), cache, plan).value
    pages = np.zeros(paged.key_pages.shape, np.uint8)
    error = refusal(qkv.KvCache, pages, pages)
    assert "uint8" in error.value and "KvCache's dtype" in error.allowed


def test_names_of_mask_operands_are_words():
    starts = np.array([0], np.int32)
    assert refusal(qkv.Batch, starts, starts[:0], mask_operands={1: starts}).argument == "mask_operands"
    assert refusal(qkv.Batch, starts, starts[:0], mask_operands={"x": 3}).argument == "mask_operands[x]"


def test_numbers_that_would_end_the_process_are_refused():
    assert refusal(qkv.set_num_threads, 2**31 - 1).argument == "num_threads"
    assert refusal(qkv.Shard(0, 0, 1).rank_of, 5).argument == "shard.num_ranks"
    assert refusal(qkv.Shard(0, 1 << 16, 1 << 16).local_position, 5).argument == "shard.interleave_size"
    assert refusal(qkv.Shard(0, 2, 1).local_length, -1).argument == "num_tokens"
    scene = qkv.MaskScene(2, 2**31 - 1, key_start=2**63 - 2**30)
    assert refusal(qkv.is_visible, "causal", scene, 0, 0).argument == "key_start"
    scene = qkv.MaskScene(2**31 - 1, 2**31 - 1)
    assert refusal(qkv.draw_mask_png, "causal", scene, "mask.png").argument == "scene"
