"""The peers, in this process: PyTorch's SDPA through cuDNN and FlashAttention-2; flash-attn-4 where it is installed.

Each makes a call of tensors [batch, tokens, heads, dim], laid out as it likes them best. A peer that is missing, or
that refuses a case, raises: the table says so and goes on."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    from flash_attn.cute import flash_attn_func as flash_attn_4
except Exception as error:  # whatever an installed but broken package raises
    flash_attn_4, why_not_flash_attn_4 = None, error


def sdpa(backend):
    def make(query, key, value, causal):
        query, key, value = (tensor.transpose(1, 2).contiguous() for tensor in (query, key, value))
        shared = query.shape[1] != key.shape[1]

        def call():
            with sdpa_kernel([backend]):
                out = torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=causal, enable_gqa=shared
                )
            return out.transpose(1, 2)

        return call

    return make


def flash_4(query, key, value, causal):
    if flash_attn_4 is None:
        raise ImportError(f"{type(why_not_flash_attn_4).__name__}: {why_not_flash_attn_4}")

    # 0: its own choice, where decode can be split at all: not on Hopper.
    num_splits = 0 if query.shape[1] == 1 and torch.cuda.get_device_capability(query.device)[0] >= 10 else 1

    def call():
        out = flash_attn_4(query, key, value, causal=causal, num_splits=num_splits)
        return out[0] if isinstance(out, tuple) else out

    return call


PEERS = {
    "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "FlashAttention-2": sdpa(SDPBackend.FLASH_ATTENTION),
    "FlashAttention-4": flash_4,
}
REHEARSAL_PEERS = {"torch": sdpa(SDPBackend.MATH)}


def peers_of(device):
    return PEERS if torch.device(device).type == "cuda" else REHEARSAL_PEERS


def matrix_product(device, size):
    """A bf16 product of the library (cuBLAS on a GPU): the rate that prefill is measured against."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * size**3, lambda: torch.mm(left, right, out=out)
