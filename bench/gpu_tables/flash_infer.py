"""FlashInfer, the peer that reads pages as qkv does: decode, prefill, and both in one step.

plan() is called when a call is made, outside what is timed, as qkv's plans are; the call is run(). Which of its
kernels runs is its own choice (backend "auto": FlashAttention-3's on Hopper where queries are long), except that
decode is offered with and without tensor cores, whose choice it leaves to its user."""

import numpy as np
import torch

WORKSPACE_BYTES = 512 << 20  # for states of split keys; its documentation names 128 MB, large batches take more


class FlashInfer:
    def __init__(self, device):
        try:
            import flashinfer
        except Exception as error:  # whatever an installed but broken package raises
            raise ImportError(f"{type(error).__name__}: {error}") from error
        self.library, self.device = flashinfer, torch.device(device)
        on_gpu = self.device.type == "cuda"
        self.workspace = torch.zeros(WORKSPACE_BYTES if on_gpu else 1 << 20, dtype=torch.uint8, device=self.device)

    def new_decode(self, *, tensor_cores):
        return self.library.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=tensor_cores)

    def new_prefill(self):
        return self.library.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")

    def decode(self, heads, page, lengths, pages, *, tensor_cores):
        """A planned wrapper of requests with one new token each. lengths, pages: as of layers.make_plan."""
        wrapper = self.new_decode(tensor_cores=tensor_cores)
        plan_decode(wrapper, heads, page, page_table(lengths, page, pages))
        return wrapper

    def prefill(self, heads, page, lengths, pages, *, causal=True):
        """A planned wrapper of requests with any number of new tokens."""
        wrapper = self.new_prefill()
        plan_prefill(wrapper, heads, page, query_starts(lengths), page_table(lengths, page, pages), causal=causal)
        return wrapper


def plan_decode(wrapper, heads, page, table, *, dtype=torch.bfloat16, window=0):
    """window: of so many tokens, their query's own included; 0: none."""
    wrapper.plan(
        *table,
        heads.query,
        heads.kv,
        heads.dim,
        page,
        window_left=window - 1,
        q_data_type=dtype,
        kv_data_type=dtype,
    )


def plan_prefill(wrapper, heads, page, starts, table, *, causal=True, dtype=torch.bfloat16, window=0):
    wrapper.plan(
        starts,
        *table,
        heads.query,
        heads.kv,
        heads.dim,
        page,
        head_dim_vo=heads.value_dim,
        causal=causal,
        window_left=window - 1,
        q_data_type=dtype,
        kv_data_type=dtype,
    )


def query_starts(lengths):
    return int32([0, *np.cumsum([new for new, _ in lengths])])


def page_table(lengths, page, pages):
    """(offsets into the page numbers, page numbers, tokens in each last page), on the host: plan() copies them."""
    keys = np.array([length for _, length in lengths])
    offsets = [0, *np.cumsum(-(-keys // page))]
    return int32(offsets), int32(pages), int32((keys - 1) % page + 1)


def int32(numbers):
    return torch.from_numpy(np.array(numbers, np.int32))


def own_layout(cache, heads):
    """A cache of Pool's, the same memory, seen as FlashInfer's default: [pages, 2, page, kv heads, dim]."""
    return cache.view(cache.shape[0], 2, cache.shape[1], heads.kv, heads.dim)
