"""Stands for FlashInfer where there is none: the calls that bench/ makes, its names and shapes, by the definition."""

import torch

__version__ = "stand-in"


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, workspace, kv_layout):
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        causal=False,
        window_left=-1,
        q_data_type=torch.float16,
        kv_data_type=None,
    ):
        for array in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert array.dtype == torch.int32 and array.is_contiguous()
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert paged_kv_indptr[-1] == len(paged_kv_indices)
        self.starts, self.offsets, self.last = qo_indptr.tolist(), paged_kv_indptr.tolist(), paged_kv_last_page_len
        self.pages, self.page_size, self.causal, self.window_left = (
            paged_kv_indices.long(),
            page_size,
            causal,
            window_left,
        )
        self.shapes = (num_qo_heads, head_dim_qk), (page_size, num_kv_heads, head_dim_vo or head_dim_qk)
        self.dtypes = q_data_type, kv_data_type or q_data_type

    def run(self, q, paged_kv_cache, *, out):
        key_cache, value_cache = paged_kv_cache if isinstance(paged_kv_cache, tuple) else paged_kv_cache.unbind(1)
        assert q.shape[1:] == self.shapes[0] and value_cache.shape[1:] == self.shapes[1]
        assert (q.dtype, key_cache.dtype) == self.dtypes and len(q) == len(out) == self.starts[-1]
        for request, last in enumerate(self.last.tolist()):
            rows = slice(*self.starts[request : request + 2])
            pages = self.pages[slice(*self.offsets[request : request + 2])]
            keys = (len(pages) - 1) * self.page_size + last
            key, value = (cache[pages].flatten(0, 1)[:keys].float() for cache in (key_cache, value_cache))
            out[rows] = self.attend(q[rows].float(), key, value).to(out.dtype)
        return out

    def attend(self, query, key, value):
        group = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        behind = torch.arange(len(key) - len(query), len(key))[:, None] - torch.arange(len(key))
        hidden = (behind < 0) & self.causal
        if self.window_left >= 0:
            hidden |= behind > self.window_left
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(self, workspace, kv_layout, use_tensor_cores=False):
        super().__init__(workspace, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options):
        starts = torch.arange(len(indptr), dtype=torch.int32)
        super().plan(starts, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options)


def append_paged_kv_cache(
    key, value, batch_indices, positions, cache, kv_indices, kv_indptr, kv_last_page_len, kv_layout
):
    assert kv_layout == "NHD" and len(key) == len(value) == len(batch_indices) == len(positions)
    request, position, page_size = batch_indices.long(), positions.long(), cache.shape[2]
    ends = (kv_indptr[1:].long() - kv_indptr[:-1] - 1) * page_size + kv_last_page_len
    assert (position < ends[request]).all()
    pages = kv_indices.long()[kv_indptr.long()[request] + position // page_size]
    cache[pages, 0, position % page_size], cache[pages, 1, position % page_size] = key, value
