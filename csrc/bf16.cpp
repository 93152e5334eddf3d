// Blocks of logits from pairs of bf16 (AVX-512's dot product), with fp32 sums.
#if defined(__x86_64__)
#include "linear.h"

#if __has_include(<avx512bf16intrin.h>)
#include <cpuid.h>
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#define GRPO_BF16 __attribute__((target("avx512f,avx512bf16")))

namespace grpo {
namespace {

// A vector holds a pair of elements of each of sixteen tokens. Subnormal bf16 counts as zero.
constexpr int64_t kLanes = 16, kTileRows = 8, kTileVectors = 3;  // sums that fit the registers
constexpr int64_t kPanel = kTileVectors * kLanes;
constexpr int64_t kPairBlock = 64;  // summed separately, as in gemm_fp32-inl.h
constexpr int64_t kGroupStride = kBlockRows * kLanes;

int64_t pairs_of(const Linear& linear) { return (linear.depth + 1) / 2; }

int64_t packed_bytes(const Linear& linear, int64_t padded) {
  return padded * pairs_of(linear) * sizeof(uint32_t);
}

int64_t scratch_bytes(const Linear&) { return kBlockRows * kPairBlock * sizeof(uint32_t); }

int64_t panel_width(const Chunk& chunk, int64_t at) { return std::min(kPanel, chunk.padded - at); }

// Pairs of a row starting at element `first`; an odd depth is padded with a zero.
void load_pairs(const void* row, int64_t first, int64_t depth, int64_t pairs, uint32_t* to) {
  const auto* source = static_cast<const uint16_t*>(row) + first;
  to[pairs - 1] = 0;
  std::memcpy(to, source, std::min(2 * pairs, depth - first) * sizeof(uint16_t));
}

// To (pair, token, 2).
void pack(const Linear& linear, const Chunk& chunk, int64_t at, void* packed) {
  const int64_t width = panel_width(chunk, at), pairs = pairs_of(linear);
  uint32_t* target = static_cast<uint32_t*>(packed) + at * pairs;
  std::memset(target, 0, width * pairs * sizeof(uint32_t));
  for (int64_t token = 0; token < std::min(width, chunk.count - at); ++token) {
    const auto* source = static_cast<const uint16_t*>(linear.hidden) +
                         (chunk.first + at + token) * linear.hidden_stride;
    for (int64_t pair = 0; pair < pairs; ++pair) {
      load_pairs(source, 2 * pair, linear.depth, 1, target + pair * width + token);
    }
  }
}

// kTileRows rows of weight times a panel of kVectors vectors.
template <int64_t kVectors>
GRPO_BF16 void tile_gemm(const uint32_t* weight, const uint32_t* x, int64_t pairs, bool add,
                         float* out) {
  __m512 sums[kTileRows][kVectors] = {};
  for (int64_t k = 0; k < pairs; ++k) {
    __m512bh column[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) {
      column[v] = (__m512bh)_mm512_loadu_si512(x + (k * kVectors + v) * kLanes);
    }
    for (int64_t row = 0; row < kTileRows; ++row) {
      const auto factor = (__m512bh)_mm512_set1_epi32(int(weight[row * kPairBlock + k]));
      for (int64_t v = 0; v < kVectors; ++v) {
        sums[row][v] = _mm512_dpbf16_ps(sums[row][v], factor, column[v]);
      }
    }
  }
  for (int64_t row = 0; row < kTileRows; ++row) {
    for (int64_t v = 0; v < kVectors; ++v) {
      float* target = out + v * kGroupStride + row * kLanes;
      _mm512_storeu_ps(target, add ? _mm512_loadu_ps(target) + sums[row][v] : sums[row][v]);
    }
  }
}

void block(const Linear& linear, const Chunk& chunk, int64_t row, int64_t rows, void* scratch,
           float* out) {
  const auto* source = static_cast<const uint16_t*>(linear.weight) + row * linear.weight_stride;
  auto* weight = static_cast<uint32_t*>(scratch);
  for (int64_t begin = 0; begin < pairs_of(linear); begin += kPairBlock) {
    const int64_t pairs = std::min(kPairBlock, pairs_of(linear) - begin);
    for (int64_t i = 0; i < rows; ++i) {
      load_pairs(source + i * linear.weight_stride, 2 * begin, linear.depth, pairs,
                 weight + i * kPairBlock);
    }
    for (int64_t at = 0; at < chunk.padded; at += kPanel) {
      const int64_t width = panel_width(chunk, at);
      const auto gemm = width == kLanes       ? tile_gemm<1>
                        : width == 2 * kLanes ? tile_gemm<2>
                                              : tile_gemm<kTileVectors>;
      const uint32_t* x =
          static_cast<const uint32_t*>(chunk.packed) + at * pairs_of(linear) + begin * width;
      for (int64_t i = 0; i < rows; i += kTileRows) {  // results past the last row are not read
        gemm(weight + i * kPairBlock, x, pairs, begin > 0, out + at * kBlockRows + i * kLanes);
      }
    }
  }
}

}  // namespace

const Gemm kBf16Gemm = {11 * kPanel, kPanel, packed_bytes, scratch_bytes, pack, block};

bool has_bf16() {
  constexpr unsigned kBf16 = 1u << 5;
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kBf16);
}

}  // namespace grpo

#else

namespace grpo {
const Gemm kBf16Gemm = {};
bool has_bf16() { return false; }
}  // namespace grpo

#endif
#endif
