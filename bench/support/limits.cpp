#include "bench/support/limits.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "qkv/device.hpp"

#ifdef QKV_HAVE_OPENBLAS
#include <cblas.h>
#endif

namespace qkv::bench {
namespace {

std::shared_ptr<std::vector<float>> filled(int64_t count) {
  auto values = std::make_shared<std::vector<float>>(count);
  for (int64_t i = 0; i < count; ++i) (*values)[i] = static_cast<float>(i % 97) / 97.0F - 0.5F;
  return values;
}

constexpr int64_t kChunk = 1 << 16;  // floats a thread takes at once

}  // namespace

Contestant read_limit(int64_t bytes) {
  const int64_t count = bytes / 4;
  auto data = filled(count);
  auto sink = std::make_shared<float>();
  return {"limit", static_cast<double>(bytes) * 1e-9, [data, sink, count] {
            const float* values = data->data();
            float total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total) num_threads(num_threads())
            for (int64_t chunk = 0; chunk < count / kChunk; ++chunk) {
              float sums[64] = {};
              for (int64_t i = chunk * kChunk; i < (chunk + 1) * kChunk; i += 64) {
                for (int64_t lane = 0; lane < 64; ++lane) sums[lane] += values[i + lane];
              }
              for (const float sum : sums) total += sum;
            }
            *sink += total;
          }};
}

Contestant copy_limit(int64_t bytes) {
  const int64_t count = bytes / 8;  // half is read, half is written
  auto from = filled(count);
  auto to = filled(count);
  return {"limit", static_cast<double>(bytes) * 1e-9, [from, to, count] {
            const int64_t chunks = (count + kChunk - 1) / kChunk;
#pragma omp parallel for schedule(static) num_threads(num_threads())
            for (int64_t chunk = 0; chunk < chunks; ++chunk) {
              const int64_t begin = chunk * kChunk;
              std::memcpy(to->data() + begin, from->data() + begin, std::min(kChunk, count - begin) * sizeof(float));
            }
          }};
}

#ifdef QKV_HAVE_OPENBLAS

std::vector<Contestant> sgemm_limit() {
  constexpr int32_t kSize = 2048;
  auto a = filled(int64_t{kSize} * kSize);
  auto b = filled(int64_t{kSize} * kSize);
  auto c = filled(int64_t{kSize} * kSize);
  return {{"limit", 2e-9 * kSize * kSize * kSize, [a, b, c] {
             openblas_set_num_threads(num_threads());
             cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kSize, kSize, kSize, 1.0F, a->data(), kSize,
                         b->data(), kSize, 0.0F, c->data(), kSize);
           }}};
}

std::vector<Contestant> naive_attention(int32_t tokens, int32_t num_q_heads, int32_t num_kv_heads, int32_t dim,
                                        bool causal, double gflop) {
  auto query = filled(int64_t{tokens} * num_q_heads * dim);
  auto key = filled(int64_t{tokens} * num_kv_heads * dim);
  auto value = filled(int64_t{tokens} * num_kv_heads * dim);
  auto out = filled(int64_t{tokens} * num_q_heads * dim);
  auto scores = filled(int64_t{tokens} * tokens);
  return {{"unfused OpenBLAS", gflop, [=] {
             openblas_set_num_threads(num_threads());
             const float scale = 1.0F / std::sqrt(static_cast<float>(dim));
             for (int32_t head = 0; head < num_q_heads; ++head) {
               const int64_t kv_offset = int64_t{head / (num_q_heads / num_kv_heads)} * dim;
               cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, tokens, tokens, dim, scale,
                           query->data() + int64_t{head} * dim, num_q_heads * dim, key->data() + kv_offset,
                           num_kv_heads * dim, 0.0F, scores->data(), tokens);
#pragma omp parallel for schedule(dynamic, 16) num_threads(num_threads())
               for (int32_t row = 0; row < tokens; ++row) {
                 float* s = scores->data() + int64_t{row} * tokens;
                 const int32_t visible = causal ? row + 1 : tokens;
                 const float maximum = *std::max_element(s, s + visible);
                 float sum = 0;
                 for (int32_t j = 0; j < visible; ++j) sum += s[j] = std::exp(s[j] - maximum);
                 for (int32_t j = 0; j < visible; ++j) s[j] /= sum;
                 std::fill(s + visible, s + tokens, 0.0F);
               }
               cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, tokens, dim, tokens, 1.0F, scores->data(), tokens,
                           value->data() + kv_offset, num_kv_heads * dim, 0.0F, out->data() + int64_t{head} * dim,
                           num_q_heads * dim);
             }
           }}};
}

#else

std::vector<Contestant> sgemm_limit() { return {}; }
std::vector<Contestant> naive_attention(int32_t, int32_t, int32_t, int32_t, bool, double) { return {}; }

#endif

}  // namespace qkv::bench
