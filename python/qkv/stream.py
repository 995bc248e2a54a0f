"""Which CUDA stream a call's work on a GPU is ordered on."""

import sys
from typing import Any, Protocol, TypeAlias

from .error import Error


class TorchStream(Protocol):
    """A torch.cuda.Stream, or what else has its attribute."""

    @property
    def cuda_stream(self) -> int: ...


class CudaStream(Protocol):
    """A stream of cuda.core, cuda.bindings, or CuPy: (version of the protocol, address)."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


# An int is the address of a CUstream or cudaStream_t; 0 is the default stream.
Stream: TypeAlias = int | TorchStream | CudaStream

_ALLOWED = "None, the address of a CUstream, or an object with cuda_stream or __cuda_stream__ (version 0)"


def handle_of(stream: Stream | None, device_index: int) -> int:
    """The CUstream's address. None is torch's current stream on the device, without torch the default stream."""
    if stream is None:
        return _current_handle(device_index)
    handle = _handle_in(stream)
    if not isinstance(handle, int) or isinstance(handle, bool) or not 0 <= handle < 1 << 64:
        value = repr(stream) if isinstance(stream, int) else f"an object of type {type(stream).__name__}"
        raise Error("invalid_argument", "stream", value, _ALLOWED)
    return handle


def _handle_in(stream: Any) -> Any:
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "cuda_stream"):
        return stream.cuda_stream
    pair = getattr(stream, "__cuda_stream__", None)
    pair = pair() if callable(pair) else pair  # an attribute in early versions of the protocol
    return pair[1] if isinstance(pair, tuple) and len(pair) == 2 and pair[0] == 0 else None


def _current_handle(device_index: int) -> int:
    torch = sys.modules.get("torch")
    # Until torch has used a GPU, nobody has chosen another current stream than the default one.
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return torch.cuda.current_stream(device_index).cuda_stream
