// quickstart.cpp in C: one decode step of two requests over a paged cache.
#include <stdio.h>

#include "qkv/qkv.h"

#define VIEW(data, dtype, rank, ...) qkv_tensor_contiguous(data, dtype, rank, (int64_t[]){__VA_ARGS__})

int main(void) {
  static float pages[4 * 2 * 16 * 128], query[2 * 8 * 64], key[2 * 2 * 64], value[2 * 2 * 64], out[2 * 8 * 64];
  for (int i = 0; i < 4 * 2 * 16 * 128; ++i) pages[i] = 0.3F;  // [page][KV head][token][key | value]
  for (int i = 0; i < 2 * 8 * 64; ++i) query[i] = 0.1F;
  for (int i = 0; i < 2 * 2 * 64; ++i) key[i] = 0.2F, value[i] = 0.8F;
  const qkv_tensor pages_view = VIEW(pages, QKV_F32, 4, 4, 2, 16, 128), query_view = VIEW(query, QKV_F32, 3, 2, 8, 64),
                   key_view = VIEW(key, QKV_F32, 3, 2, 2, 64), value_view = VIEW(value, QKV_F32, 3, 2, 2, 64),
                   out_view = VIEW(out, QKV_F32, 3, 2, 8, 64);
  const int32_t query_start_loc[] = {0, 1, 2}, seq_lens[] = {5, 20}, block_table[] = {3, -1, 0, 2};
  const int64_t slot_mapping[] = {3 * 16 + 4, 2 * 16 + 3};  // token 4 of request 0 and token 19 of request 1
  const qkv_batch batch = {
      sizeof batch, .query_start_loc = VIEW(query_start_loc, QKV_I32, 1, 3), .seq_lens = VIEW(seq_lens, QKV_I32, 1, 2),
      .block_table = VIEW(block_table, QKV_I32, 2, 2, 2), .slot_mapping = VIEW(slot_mapping, QKV_I64, 1, 2)};
  const qkv_layer_spec spec = {sizeof spec,    .num_q_heads = 8, .num_kv_heads = 2,
                               .head_dim = 64, .has_cache = 1,   .page_size = 16};

  qkv_kv_cache cache;
  qkv_attention* attention = NULL;
  qkv_plan* plan = NULL;
  const int failed = qkv_kv_cache_from_interleaved(&pages_view, 64, &cache) ||
                     qkv_attention_create(&spec, (qkv_device){QKV_CPU, 0}, &attention) ||  // once a layer
                     qkv_attention_plan(attention, &batch, &plan, NULL) ||                 // once a step
                     qkv_attention_update_cache(attention, &key_view, &value_view, &cache, plan, NULL) ||
                     qkv_attention_forward(attention, &query_view, &cache, plan, &out_view, NULL, NULL, NULL, NULL);
  if (failed) {
    fprintf(stderr, "%s\n", qkv_last_error_message());
  } else {
    printf("request 0: %.3f, request 1: %.3f\n", out[0], out[8 * 64]);
  }
  qkv_plan_destroy(plan);
  qkv_attention_destroy(attention);
  return failed;
}
