"""What the package accepts as a tensor, and how it makes one of the caller's kind."""

import sys
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .error import Error


@runtime_checkable
class Array(Protocol):
    """A numpy array, a torch tensor, or any other object that speaks DLPack. Never copied."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


_TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i32": "int32", "i64": "int64"}


def is_torch(array: Any) -> bool:
    """True for torch tensors. Does not import torch: whoever holds a tensor has done so."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def numpy_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of one of the library's names; bf16 needs the package ml_dtypes."""
    if dtype == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_TORCH_NAMES[dtype])


def zeros(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array of zeros: a torch tensor if ``like`` is one, else a numpy array."""
    if is_torch(like):
        torch = sys.modules["torch"]
        return torch.zeros(shape, dtype=getattr(torch, _TORCH_NAMES[dtype]), device=like.device)
    return np.zeros(shape, numpy_dtype(dtype))


def to_numpy(array: Any, argument: str) -> np.ndarray:
    """A numpy view of an array on the CPU, for index arithmetic on the host."""
    if isinstance(array, np.ndarray):
        return array
    if not isinstance(array, Array):
        raise Error("invalid_argument", argument, f"an object of type {type(array).__name__}", "a tensor")
    return np.from_dlpack(array)
