// The many-rows kernel of every instruction set.
#include "cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward_many_rows.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// The order matters: the files below are compiled once a target.
#include "cpu/many_rows-inl.hpp"
#include "cpu/panel_products-inl.hpp"
#include "cpu/tile_products-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_VECTORS

void forward_many_rows(const ForwardTask& task) {
  static thread_local ManyRowsScratch<PanelProducts> scratch;
  ManyRows<PanelProducts>(task, scratch).run();
}

#endif
#if QKV_TARGET_HAS_TILES

void forward_many_rows_on_tiles(const ForwardTask& task) {
  if (!TileProducts::supports(task)) return forward_many_rows(task);
  static thread_local ManyRowsScratch<TileProducts> scratch;
  const tiles::Use use;
  ManyRows<TileProducts>(task, scratch).run();
}

#endif
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();
