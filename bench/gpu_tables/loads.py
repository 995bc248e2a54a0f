"""The limit of decode: a kernel that reads the same pages in the same order, and does nothing with them."""

import torch

# A CTA reads chunks of THREADS x LOADS x 16 bytes, all loads of a chunk under way at once; pages are whole chunks.
TEXT = r"""
template <int LOADS>
__global__ void __launch_bounds__(256, 5)
read_pages(const uint4* memory, const int* pages, long long page_vectors, long long num_chunks, unsigned* never) {
  const long long chunk_vectors = 256 * LOADS;
  const long long chunks_a_page = page_vectors / chunk_vectors;
  unsigned bits = 0;
  for (long long chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const long long page = pages[chunk / chunks_a_page];
    const uint4* from = memory + page * page_vectors + chunk % chunks_a_page * chunk_vectors + threadIdx.x;
    uint4 loaded[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) loaded[i] = __ldcs(from + i * 256);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) bits |= loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
  }
  if (bits == 0 && never != nullptr) *never = bits;  // keeps the loads; never is null
}
"""
THREADS, CHOICES = 256, (8, 4, 2, 1)


class PageReader:
    def __init__(self, device):
        self.device = torch.device(device)
        if self.device.type != "cuda":
            return
        import cupy  # without it the tables have no limit

        names = [f"read_pages<{loads}>" for loads in CHOICES]
        self.cupy = cupy
        self.module = cupy.RawModule(code=TEXT, options=("-std=c++17",), name_expressions=names)
        self.kernels = {loads: self.module.get_function(name) for loads, name in zip(CHOICES, names, strict=True)}
        self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count

    def call(self, cache, pages):
        """Reads each of `pages` of a cache [pages, ...] once. pages: an int32 tensor of the device."""
        if self.device.type != "cuda":
            indices = pages.long()
            return lambda: cache[indices].float().sum()
        page_vectors = cache[0].numel() * cache.element_size() // 16
        loads = self._loads(page_vectors, len(pages) * page_vectors)
        chunks = len(pages) * page_vectors // (THREADS * loads)
        grid = min(chunks, 5 * self.num_sms)
        kernel, cupy = self.kernels[loads], self.cupy
        arguments = (cache.data_ptr(), pages.data_ptr(), page_vectors, chunks, 0)
        arguments = tuple(cupy.int64(a) if i in (2, 3) else cupy.uint64(a) for i, a in enumerate(arguments))

        def run():
            with cupy.cuda.ExternalStream(torch.cuda.current_stream(self.device).cuda_stream):
                kernel((grid,), (THREADS,), arguments)

        return run

    def _loads(self, page_vectors, vectors):
        """As many loads a thread as leave every SM two CTAs."""
        fits = [loads for loads in CHOICES if page_vectors % (THREADS * loads) == 0]
        if not fits:
            raise ValueError(f"pages of {16 * page_vectors} bytes: the kernel reads multiples of {16 * THREADS}")
        filling = [loads for loads in fits if vectors // (THREADS * loads) >= 2 * self.num_sms]
        return filling[0] if filling else fits[-1]
