// wgmma's shared-memory descriptors of swizzled tiles of 16-bit elements, and the steps of k = 16 through them. A tile
// is blocks of kColumns columns (64 or 32) under the swizzle of their rows' bytes (128 or 64), beginning at a multiple
// of 1024.
#pragma once

namespace qkv::cuda::tile {

// High half: the swizzle, and 16-byte units from one group of eight rows to the next.
template <int kColumns>
constexpr unsigned kDescriptorHigh = (kColumns == 64 ? 1u << 30 : 2u << 30) | kColumns;

// Bits 0-13: address / 16. In a cluster the upper address bits hold the CTA's rank; they would fall into the
// leading offset, hence the mask.
__device__ __forceinline__ unsigned descriptor_address(unsigned address) { return (address & 0x3FFFF) >> 4; }

// Rows are rows of the operand (queries, keys): the leading offset is ignored.
__device__ __forceinline__ unsigned descriptor_k_major(unsigned address) {
  return descriptor_address(address) | 1u << 16;
}
// What a descriptor was made of.
__device__ __forceinline__ unsigned address_of_descriptor(unsigned descriptor) { return (descriptor & 0x3FFF) << 4; }
template <int kColumns>
__device__ constexpr unsigned k_major_step(int k, int rows) {
  constexpr int kSteps = kColumns / 16;  // of a block
  return k / kSteps * (rows * kColumns / 8) + k % kSteps * 2;
}

// Rows are steps along k (values): the leading offset leads from one block to the next. Boxes of box_rows tokens lie
// one after another, each with all its blocks.
template <int kColumns>
__device__ __forceinline__ unsigned descriptor_n_major(unsigned address, int box_rows) {
  return descriptor_address(address) | static_cast<unsigned>(box_rows * kColumns / 8) << 16;
}
template <int kColumns>
__device__ constexpr unsigned n_major_step(int k, int box_rows, int columns) {
  return k * 16 / box_rows * (box_rows * columns / 8) + k * 16 % box_rows * (kColumns / 8);
}

}  // namespace qkv::cuda::tile
