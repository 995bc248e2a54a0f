"""Where generate.py's queries, keys and values lie: numpy arrays, or their copies on a GPU, made by torch."""

import numpy as np
import qkv


class HostTensors:
    """The CPU engine reads numpy arrays where they are."""

    def __init__(self, kv_dtype: str) -> None:
        self.query_dtype = "f32"
        self.cache_dtype = qkv.array.numpy_dtype(kv_dtype)

    def cache(self, shape: tuple[int, ...]):
        return np.zeros(shape, self.cache_dtype)

    def send(self, array: np.ndarray):
        return array

    def fetch(self, tensor) -> np.ndarray:
        return tensor


class GpuTensors:
    """The GPU engine takes queries of the cache's 16-bit format. The model is numpy's, so each layer's tensors move."""

    def __init__(self, device: str, kv_dtype: str) -> None:
        import torch

        self.torch, self.device, self.query_dtype = torch, device, kv_dtype
        self.dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kv_dtype]

    def cache(self, shape: tuple[int, ...]):
        return self.torch.zeros(shape, dtype=self.dtype, device=self.device)

    def send(self, array: np.ndarray):
        return self.torch.from_numpy(np.ascontiguousarray(array)).to(self.device, self.dtype)

    def fetch(self, tensor) -> np.ndarray:
        return tensor.float().cpu().numpy()
