"""A drop-in for FlashAttention's variable-length call, as vLLM wraps it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import mask as masks
from ._qkv import Mask, varlen_attention
from .array import Array, is_torch, to_numpy, torch_work_on, zeros
from .error import Error
from .stream import Stream


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    max_seqlen_q: int,
    cu_seqlens_q: Array,
    max_seqlen_k: int,
    cu_seqlens_k: Array | None = None,
    seqused_k: Array | None = None,
    q_v: Array | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | Array = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,  # noqa: ARG001 - the result is always deterministic
    return_attn_probs: bool = False,
    block_table: Array | None = None,
    return_softmax_lse: bool = False,
    out: Array | None = None,
    scheduler_metadata: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    num_splits: int = 0,
    output_scale: Array | None = None,
    fa_version: int = 2,
    s_aux: Array | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Array | None = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_tensor_leading_dims: Any = None,
    dynamic_causal: Array | None = None,
    *,
    stream: Stream | None = None,
) -> Any:
    """Attention of a variable-length batch; returns ``out``, or ``(out, lse)`` with ``return_softmax_lse``.

    Arguments that cannot be honoured are refused by name, never ignored; every combination of the others works.
    Plans are made on the host: of the arguments below q, k, v and out, torch tensors on a GPU are copied there, which
    waits for the GPU.

    Args:
        q: [num_tokens, num_q_heads, head_dim].
        k, v: [num_keys, num_kv_heads, head_dim(_v)] with ``cu_seqlens_k``, or pages
            [num_pages, page_size, num_kv_heads, head_dim(_v)] with ``block_table`` and ``seqused_k``.
            Like q, copied if the last axis is not contiguous.
        cu_seqlens_q, cu_seqlens_k: int32 [num_requests + 1], prefix sums.
        seqused_k: int32 [num_requests], keys of each request.
        max_seqlen_q, max_seqlen_k: at least the longest request.
        causal: bottom-right aligned; an int32 tensor [num_requests] means the same as ``dynamic_causal``.
        window_size: (left, right), inclusive; -1 = open. Causal calls have right = 0.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c), before ALiBi and mask.
        alibi_slopes: float32 [num_q_heads] or [num_requests, num_q_heads].
        s_aux: [num_q_heads], sink logits.
        block_table: int32 [num_requests, max_pages].
        num_splits: 0 or 1. Splits never depend on the batch, so both give the same bits.
        q_descale, k_descale, v_descale: float32 [num_requests, num_kv_heads], of 8-bit floats, pages also of int8;
            only ones with others, as engines pass them. Without q_descale, 8-bit queries are taken as they are.
        fa_version: 2, 3 or 4, all the same here.
        dynamic_causal: int32 [num_requests]; requests with 0 are not causal, and with a window (L, 0) see (L, L).
        out: [num_tokens, num_q_heads, head_dim_v], made if not given, of q's kind.
        stream: not an argument of vLLM's: as in Attention.

    Returns:
        lse: float32 [num_q_heads, num_tokens], natural log; -inf (or the sink) for rows without a visible key.
    """
    _refuse_given(
        q_v=q_v,
        scheduler_metadata=scheduler_metadata,
        output_scale=output_scale,
        cp_tot_seqused_k=cp_tot_seqused_k,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_tensor_leading_dims=aux_tensor_leading_dims,
    )
    _refuse_unless("dropout_p", dropout_p, (0.0,))
    _refuse_unless("return_attn_probs", return_attn_probs, (False,))
    _refuse_unless("num_splits", num_splits, (0, 1))
    _refuse_unless("cp_world_size", cp_world_size, (1,))
    _refuse_unless("cp_rank", cp_rank, (0,))
    _refuse_unless("fa_version", fa_version, (2, 3, 4))
    # What torch copies here must be ordered before the kernels.
    with torch_work_on(stream, q):
        has_query_scale = _is_float8(q)
        if not has_query_scale:
            _refuse_scales(q_descale=q_descale)
        elif q_descale is None:
            q_descale = zeros(q, (1,), "f32")
            q_descale += 1
        has_scales = _is_float8(k) or _dtype_name(k) == "int8"
        if not has_scales:
            _refuse_scales(k_descale=k_descale, v_descale=v_descale)

        if getattr(causal, "shape", ()) == ():
            mask, operands = _make_mask(_truth("causal", causal), window_size, dynamic_causal)
        elif dynamic_causal is None:
            mask, operands = _make_mask(False, window_size, causal)
        else:
            raise Error("invalid_argument", "causal", "a tensor beside dynamic_causal", "one of them")
        seq_lens = _key_lengths(cu_seqlens_k, seqused_k, block_table)
        starts = to_numpy(cu_seqlens_q, "cu_seqlens_q")
        _check_maximum("max_seqlen_q", max_seqlen_q, np.diff(starts))
        _check_maximum("max_seqlen_k", max_seqlen_k, seq_lens)

        num_tokens, num_q_heads = (q if hasattr(q, "shape") else to_numpy(q, "q")).shape[:2]
        lse = zeros(q, (num_q_heads, num_tokens), "f32") if return_softmax_lse else None
        result = varlen_attention(
            _with_contiguous_rows(q),
            _with_contiguous_rows(k),
            _with_contiguous_rows(v),
            starts,
            seq_lens,
            block_table=None if block_table is None else to_numpy(block_table, "block_table"),
            mask=mask,
            mask_operands=operands,
            scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=None if alibi_slopes is None else to_numpy(alibi_slopes, "alibi_slopes"),
            sinks=None if s_aux is None else _to_float32(s_aux),
            out=out,
            lse=lse,
            key_scale=k_descale if has_scales else None,
            value_scale=v_descale if has_scales else None,
            query_scale=q_descale if has_query_scale else None,
            stream=stream,
        )
    return (result, lse) if return_softmax_lse else result


def _refuse_given(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise Error("unsupported", name, f"an object of type {type(value).__name__}", "None")


def _refuse_unless(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise Error("unsupported", name, repr(value), " or ".join(map(repr, allowed)))


def _truth(name: str, value: Any) -> bool:
    if isinstance(value, bool | np.bool_ | int) or getattr(value, "shape", None) == ():
        return bool(value)
    raise Error("invalid_argument", name, repr(value), "a bool, or a tensor with one value a request")


def _dtype_name(array: Any) -> str:
    return str(getattr(array, "dtype", "")).removeprefix("torch.")


def _is_float8(array: Any) -> bool:
    return _dtype_name(array).startswith("float8")


def _refuse_scales(**scales: Array | None) -> None:
    for name, scale in scales.items():
        if scale is not None and not np.all(to_numpy(scale, name) == 1):
            raise Error("unsupported", name, "values other than 1", "None, or ones")


def _make_mask(
    causal: bool, window_size: Sequence[int] | None, dynamic_causal: Any
) -> tuple[Mask, dict[str, np.ndarray]]:
    window = (-1, -1) if window_size is None else tuple(window_size)
    if len(window) != 2:
        raise Error("invalid_argument", "window_size", repr(window_size), "two integers (left, right); -1 = open")
    left, right = (side if side >= 0 else -1 for side in window)
    if causal:
        right = 0
    if dynamic_causal is None:
        return masks.window(left, right), {}
    # Requests that are not causal see as far ahead as back; without a window they see everything.
    if right == 0 and (causal or left >= 0):
        right = left
    flags = to_numpy(dynamic_causal, "dynamic_causal")
    if flags.dtype not in (np.bool_, np.int32):
        raise Error("invalid_argument", "dynamic_causal", f"dtype {flags.dtype}", "int32 or bool")
    operands = {"causal": np.asarray(flags, np.int32)}
    return masks.per_request_causal() & masks.window(left, right), operands


def _key_lengths(cu_seqlens_k: Array | None, seqused_k: Array | None, block_table: Array | None) -> np.ndarray:
    if (cu_seqlens_k is None) == (seqused_k is None):
        given = "neither of them" if cu_seqlens_k is None else "both"
        raise Error("invalid_argument", "cu_seqlens_k and seqused_k", given, "exactly one")
    if seqused_k is not None:
        if block_table is None:
            raise Error("invalid_argument", "block_table", "None with seqused_k", "a table; dense keys: cu_seqlens_k")
        return to_numpy(seqused_k, "seqused_k")
    if block_table is not None:
        raise Error("invalid_argument", "block_table", "a table with cu_seqlens_k", "a table with seqused_k")
    starts = to_numpy(cu_seqlens_k, "cu_seqlens_k")
    # Keys must lie as the prefix sums say; lengths alone would hide a first start that is not 0.
    if starts.dtype != np.int32 or starts.ndim != 1 or starts.size == 0 or starts[0] != 0:
        raise Error(
            "invalid_argument",
            "cu_seqlens_k",
            f"{starts.dtype} {list(starts.shape)}" + (f" from {starts.flat[0]}" if starts.size else ""),
            "int32 [num_requests + 1], from 0",
        )
    return np.diff(starts)


def _check_maximum(name: str, maximum: int, lengths: np.ndarray) -> None:
    longest = int(lengths.max(initial=0))
    if maximum < longest:
        raise Error("invalid_argument", name, str(maximum), f"at least the longest request, {longest}")


def _with_contiguous_rows(array: Any) -> Any:
    if is_torch(array):
        return array if array.stride(-1) == 1 else array.contiguous()
    if isinstance(array, np.ndarray) and array.ndim > 0 and array.strides[-1] != array.itemsize:
        return np.ascontiguousarray(array)
    return array


def _to_float32(array: Any) -> Any:
    if is_torch(array):
        array = array.float()
    return np.ascontiguousarray(to_numpy(array, "s_aux"), np.float32)
