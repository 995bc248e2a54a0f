"""The definition, in float64 and naive: what every engine is held against."""

from ._qkv import reference_attention as attention

__all__ = ["attention"]
