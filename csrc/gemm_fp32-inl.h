// Blocks of logits by fp32 multiply-adds.
#pragma once

#include <type_traits>

#include "convert-inl.h"
#include "linear.h"

namespace grpo::GRPO_ISA {

// Summed separately: a panel's share stays in L1, and fewer terms are rounded in sequence.
constexpr int64_t kDepthBlock = 128;
#if GRPO_LANES == 16
constexpr int64_t kTileRows = 8, kTileVectors = 3;  // sums that fit the registers
#elif GRPO_LANES == 8
constexpr int64_t kTileRows = 4, kTileVectors = 3;
#elif defined(__aarch64__)
constexpr int64_t kTileRows = 8, kTileVectors = 2;
#else
constexpr int64_t kTileRows = 4, kTileVectors = 2;
#endif
constexpr int64_t kPanel = kTileVectors * kLanes;
constexpr int64_t kChunkTokens = 384;  // whole panels in every instruction set
static_assert(kChunkTokens % kPanel == 0);
constexpr int64_t kGroupStride = kBlockRows * kLanes;  // between the groups of a block

// Tokens of the panel that starts at `at`, in whole groups.
GRPO_INLINE int64_t panel_width(const Chunk& chunk, int64_t at) {
  const int64_t left = (chunk.count - at + kLanes - 1) / kLanes * kLanes;
  return left < kPanel ? left : kPanel;
}

int64_t packed_bytes(const Linear& linear, int64_t tokens) {
  return tokens * linear.depth * sizeof(float);
}

template <class T>
int64_t scratch_bytes(const Linear&) {
  return std::is_same_v<T, float> ? 0 : kBlockRows * kDepthBlock * sizeof(float);
}

// To (depth, width).
template <class T>
void pack(const Linear& linear, const Chunk& chunk, int64_t at, void* packed) {
  const int64_t width = panel_width(chunk, at);
  float* target = static_cast<float*>(packed) + at * linear.depth;
  for (int64_t token = 0; token < width; ++token) {
    const T* source =
        static_cast<const T*>(linear.hidden) + (chunk.first + at + token) * linear.hidden_stride;
    const bool inside = at + token < chunk.count;
    for (int64_t k = 0; k < linear.depth; k += kLanes) {
      const int64_t count = linear.depth - k < kLanes ? linear.depth - k : kLanes;
      const Float x = !inside           ? Float{}
                      : count == kLanes ? load(source + k)
                                        : load_some(source + k, count, 0.0f);
      for (int64_t lane = 0; lane < count; ++lane) target[(k + lane) * width + token] = x[lane];
    }
  }
}

// kTileRows rows of weight times a panel of kVectors vectors, over `depth`.
template <int64_t kVectors>
GRPO_INLINE void tile_gemm(const float* const* weight, const float* x, int64_t depth, bool add,
                              float* out) {
  Float sums[kTileRows][kVectors] = {};
  const float* w[kTileRows];
  for (int64_t row = 0; row < kTileRows; ++row) w[row] = weight[row];
  for (int64_t k = 0; k < depth; ++k) {
    Float column[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) column[v] = load(x + (k * kVectors + v) * kLanes);
    for (int64_t row = 0; row < kTileRows; ++row) {
      const Float factor = splat(w[row][k]);
      for (int64_t v = 0; v < kVectors; ++v) sums[row][v] += factor * column[v];
    }
  }
  for (int64_t row = 0; row < kTileRows; ++row) {
    for (int64_t v = 0; v < kVectors; ++v) {
      float* target = out + v * kGroupStride + row * kLanes;
      store(target, add ? load(target) + sums[row][v] : sums[row][v]);
    }
  }
}

// Every row of the block times one panel. Rows past the last repeat it.
template <int64_t kVectors>
void panel_gemm(const float* weight, int64_t stride, int64_t rows, const float* x,
                   int64_t depth, bool add, float* out) {
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const float* w[kTileRows];
    for (int64_t i = 0; i < kTileRows; ++i) {
      w[i] = weight + (row + i < rows ? row + i : rows - 1) * stride;
    }
    tile_gemm<kVectors>(w, x, depth, add, out + row * kLanes);
  }
}

template <class T>
const float* fp32_rows(const T* source, int64_t stride, int64_t rows, int64_t depth,
                       float* target) {
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = source + row * stride;
    float* to = target + row * kDepthBlock;
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) store(to + k, load(from + k));
    if (k < depth) store_some(to + k, load_some(from + k, depth - k, 0.0f), depth - k);
  }
  return target;
}

template <class T>
void block(const Linear& linear, const Chunk& chunk, int64_t row, int64_t rows, void* scratch,
           float* out) {
  for (int64_t begin = 0; begin < linear.depth; begin += kDepthBlock) {
    const int64_t left = linear.depth - begin;
    const int64_t depth = left < kDepthBlock ? left : kDepthBlock;
    const T* source = static_cast<const T*>(linear.weight) + row * linear.weight_stride + begin;
    const float* weight;
    int64_t stride = kDepthBlock;
    if constexpr (std::is_same_v<T, float>) {
      weight = source;
      stride = linear.weight_stride;
    } else {
      weight =
          fp32_rows(source, linear.weight_stride, rows, depth, static_cast<float*>(scratch));
    }
    for (int64_t at = 0; at < chunk.count; at += kPanel) {
      const int64_t width = panel_width(chunk, at);
      const float* x =
          static_cast<const float*>(chunk.packed) + at * linear.depth + begin * width;
      float* to = out + at * kBlockRows;
      const bool add = begin > 0;
      if (width == kLanes) {
        panel_gemm<1>(weight, stride, rows, x, depth, add, to);
      } else if (width == 2 * kLanes) {
        panel_gemm<2>(weight, stride, rows, x, depth, add, to);
      } else {
        panel_gemm<kTileVectors>(weight, stride, rows, x, depth, add, to);
      }
    }
  }
}

template <class T>
constexpr Gemm kGemm = {kChunkTokens,     kPanel,  packed_bytes,
                        scratch_bytes<T>, pack<T>, block<T>};

}  // namespace grpo::GRPO_ISA
