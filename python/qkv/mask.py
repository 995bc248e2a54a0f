"""Masks as algebra: atoms and built-ins that join with ``+ - < <= > >= == != & | ~``.

>>> causal = qkv.mask.kv_pos() <= qkv.mask.q_pos()
>>> windowed = causal & (qkv.mask.q_pos() - qkv.mask.kv_pos() <= 127)
"""

from ._qkv import (
    causal,
    document,
    everything,
    kv_len,
    kv_pos,
    nothing,
    operand,
    per_request_causal,
    prefix_lm,
    q_head,
    q_len,
    q_pos,
    request,
    rswa,
    sliding_window,
    tree,
    window,
)

__all__ = [
    "causal",
    "document",
    "everything",
    "kv_len",
    "kv_pos",
    "nothing",
    "operand",
    "per_request_causal",
    "prefix_lm",
    "q_head",
    "q_len",
    "q_pos",
    "request",
    "rswa",
    "sliding_window",
    "tree",
    "window",
]
