"""What the package accepts as a tensor, and how it makes one of the caller's kind."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .error import Error
from .stream import Stream, handle_of


@runtime_checkable
class Array(Protocol):
    """A numpy array, a torch tensor, or any other object that speaks DLPack. Never copied."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


_TORCH_NAMES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
}


def is_torch(array: Any) -> bool:
    """True for torch tensors. Does not import torch: whoever holds a tensor has done so."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def numpy_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of one of the library's names; bf16 and the 8-bit floats need the package ml_dtypes."""
    if dtype in ("bf16", "f8e4m3", "f8e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _TORCH_NAMES[dtype]))
    return np.dtype(_TORCH_NAMES[dtype])


def zeros(like: Any, shape: tuple[int, ...], dtype: str, stream: Stream | None = None) -> Any:
    """A new array of zeros: a torch tensor on the device of ``like`` if it is one, else a numpy array.

    On a GPU the zeros are written on the stream (None: torch's current one), so that what follows there finds them.
    """
    if is_torch(like):
        torch = sys.modules["torch"]
        with torch_work_on(stream, like):
            return torch.zeros(shape, dtype=getattr(torch, _TORCH_NAMES[dtype]), device=like.device)
    return np.zeros(shape, numpy_dtype(dtype))


def torch_work_on(stream: Stream | None, like: Any) -> AbstractContextManager[Any]:
    """Inside, torch's work on the GPU that ``like`` lies on goes to the stream; nothing changes for other arrays."""
    if stream is None or not is_torch(like) or not like.is_cuda:
        return nullcontext()
    torch, handle = sys.modules["torch"], handle_of(stream, like.device.index)
    # ExternalStream takes 0 for "make one".
    default = torch.cuda.default_stream(like.device)
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=like.device) if handle else default)


def to_numpy(array: Any, argument: str) -> np.ndarray:
    """A numpy view, for arithmetic on the host. Torch tensors on a GPU are copied, after the work on their stream."""
    if isinstance(array, np.ndarray):
        return array
    if is_torch(array):
        array = array.cpu()
    if not isinstance(array, Array):
        raise Error("invalid_argument", argument, f"an object of type {type(array).__name__}", "a tensor")
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, ValueError) as reason:
        value = f"an object of type {type(array).__name__}: {reason}"
        raise Error(
            "invalid_argument", argument, value, "an array of the host's memory, of a dtype of numpy's"
        ) from reason
