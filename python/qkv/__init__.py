"""Attention engine for LLM serving.

The life of a step: ``Attention(spec)`` once a layer, ``attention.plan(batch)`` once a step, then
``attention.update_cache(key, value, cache, plan)`` and ``attention.forward(query, cache, plan)`` in each layer.
Tensors are numpy arrays, torch tensors, or anything else with ``__dlpack__``; they are never copied.
"""

from . import array, mask, reference
from ._qkv import (
    Attention,
    Batch,
    CacheSpec,
    KvCache,
    LayerSpec,
    Mask,
    MaskScene,
    MaskValue,
    Plan,
    cache_write,
    classify_tile,
    draw_mask_png,
    draw_mask_text,
    explain,
    fill_prefix_lm_spans,
    fill_tree,
    info,
    instruction_set_in_use,
    instruction_sets,
    is_visible,
    lse_from_lse2,
    merge_states,
    num_threads,
    operands_of,
    parse_mask,
    set_num_threads,
    support_matrix,
    varlen_attention,
    version,
)
from .error import Error
from .flash_attn import flash_attn_varlen_func

__version__ = version()

__all__ = [
    "Attention",
    "Batch",
    "CacheSpec",
    "Error",
    "KvCache",
    "LayerSpec",
    "Mask",
    "MaskScene",
    "MaskValue",
    "Plan",
    "array",
    "cache_write",
    "classify_tile",
    "draw_mask_png",
    "draw_mask_text",
    "explain",
    "fill_prefix_lm_spans",
    "fill_tree",
    "flash_attn_varlen_func",
    "info",
    "instruction_set_in_use",
    "instruction_sets",
    "is_visible",
    "lse_from_lse2",
    "mask",
    "merge_states",
    "num_threads",
    "operands_of",
    "parse_mask",
    "reference",
    "set_num_threads",
    "support_matrix",
    "varlen_attention",
    "version",
]
