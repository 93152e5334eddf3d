// Blocks of logits from bf16 in the matrix registers (AMX), with fp32 sums.
#if defined(__x86_64__)
#include "linear.h"

#if defined(__linux__) && (__has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>))
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#define GRPO_AMX __attribute__((target("amx-tile,amx-bf16,avx512f")))

namespace grpo {
namespace {

// A register holds sixteen rows of 64 bytes. Weight: 32 elements of each of sixteen rows. Tokens:
// row i has the elements 2i and 2i + 1 of sixteen tokens. Sums: a row per row of weight, with
// sixteen tokens side by side. Subnormal bf16 counts as zero.
constexpr int64_t kRows = 16, kRowBytes = 64, kStepElements = 32;
constexpr int64_t kRegister = kRows * kRowBytes;
constexpr int64_t kStepsAtATime = 16;  // 32 rows of weight stay in L1 for all tokens
constexpr int64_t kGroupStride = kBlockRows * kRows;

int64_t steps(const Linear& linear) {
  return (linear.depth + kStepElements - 1) / kStepElements;
}

int64_t packed_bytes(const Linear& linear, int64_t padded) {
  return padded / kRows * steps(linear) * kRegister;
}

int64_t scratch_bytes(const Linear& linear) {
  return kBlockRows / kRows * steps(linear) * kRegister;
}

// To (group, step, pair, token, 2).
void pack(const Linear& linear, const Chunk& chunk, int64_t at, void* packed) {
  const int64_t bytes = steps(linear) * kRegister, pairs = steps(linear) * kRows;
  char* target = static_cast<char*>(packed) + at / kRows * bytes;
  std::memset(target, 0, bytes);
  const int64_t tokens = std::min(kRows, chunk.count - at);
  for (int64_t token = 0; token < tokens; ++token) {
    const auto* source = static_cast<const uint16_t*>(linear.hidden) +
                         (chunk.first + at + token) * linear.hidden_stride;
    for (int64_t pair = 0; pair < pairs && 2 * pair < linear.depth; ++pair) {
      const int64_t count = std::min<int64_t>(2, linear.depth - 2 * pair);
      std::memcpy(target + pair * kRowBytes + token * 4, source + 2 * pair, 2 * count);
    }
  }
}

// To (sixteen rows, step, row, 32); elements past the depth are zeros.
GRPO_AMX void pack_rows(const Linear& linear, int64_t row, int64_t rows, char* target) {
  const int64_t whole = linear.depth / kStepElements;
  const int64_t tail = (linear.depth - whole * kStepElements) * 2;
  for (int64_t i = 0; i < rows; ++i) {
    const char* source = reinterpret_cast<const char*>(static_cast<const uint16_t*>(linear.weight) +
                                                       (row + i) * linear.weight_stride);
    char* to = target + i / kRows * steps(linear) * kRegister + i % kRows * kRowBytes;
    for (int64_t step = 0; step < whole; ++step) {
      std::memcpy(to + step * kRegister, source + step * kRowBytes, kRowBytes);
    }
    if (tail == 0) continue;
    std::memset(to + whole * kRegister, 0, kRowBytes);
    std::memcpy(to + whole * kRegister, source + whole * kRowBytes, tail);
  }
}

GRPO_AMX void configure() {
  struct alignas(kRowBytes) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = kRowBytes;
    config.rows[i] = kRows;
  }
  _tile_loadconfig(&config);
}

// Addresses of the operands of a GEMM with 32 rows and 32 tokens.
struct Operands {
  const char* weight;
  const char* tokens;
  int64_t stride;  // bytes between groups of sixteen rows or tokens
};

// 32 rows, and 32 or sixteen tokens: adds the products of `count` steps to the sums.
template <bool kBothGroups>
GRPO_AMX inline void tile_gemm(const Operands& from, int64_t count, bool add, float* out) {
  float* second = out + kGroupStride;
  float* lower = out + kRows * kRows;
  float* second_lower = second + kRows * kRows;
  if (add) {
    _tile_loadd(0, out, kRowBytes);
    _tile_loadd(1, lower, kRowBytes);
    if (kBothGroups) _tile_loadd(2, second, kRowBytes);
    if (kBothGroups) _tile_loadd(3, second_lower, kRowBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < count; ++step) {
    const char* weight = from.weight + step * kRegister;
    const char* tokens = from.tokens + step * kRegister;
    _tile_loadd(4, weight, kRowBytes);
    _tile_stream_loadd(6, tokens, kRowBytes);  // leaves weight in L1
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, weight + from.stride, kRowBytes);
    _tile_dpbf16ps(1, 5, 6);
    if (!kBothGroups) continue;
    _tile_stream_loadd(7, tokens + from.stride, kRowBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, kRowBytes);
  _tile_stored(1, lower, kRowBytes);
  if (kBothGroups) _tile_stored(2, second, kRowBytes);
  if (kBothGroups) _tile_stored(3, second_lower, kRowBytes);
}

GRPO_AMX void block(const Linear& linear, const Chunk& chunk, int64_t row, int64_t rows,
                    void* scratch, float* out) {
  char* weight = static_cast<char*>(scratch);
  pack_rows(linear, row, rows, weight);
  configure();
  const int64_t all = steps(linear), stride = all * kRegister;
  const int64_t parts = (all + kStepsAtATime - 1) / kStepsAtATime;
  const int64_t size = (all + parts - 1) / parts;
  for (int64_t step = 0; step < all; step += size) {
    const int64_t count = std::min(size, all - step);
    for (int64_t first = 0; first < rows; first += 2 * kRows) {
      for (int64_t token = 0; token < chunk.count; token += 2 * kRows) {
        const Operands from = {
            weight + first / kRows * stride + step * kRegister,
            static_cast<const char*>(chunk.packed) + token / kRows * stride + step * kRegister,
            stride};
        float* to = out + token * kBlockRows + first * kRows;
        if (chunk.padded - token > kRows) {
          tile_gemm<true>(from, count, step > 0, to);
        } else {
          tile_gemm<false>(from, count, step > 0, to);
        }
      }
    }
  }
  _tile_release();
}

}  // namespace

const Gemm kAmxGemm = {512, kRows, packed_bytes, scratch_bytes, pack, block};

bool amx_granted() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kBf16) || !(d & kTile)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace grpo

#else

namespace grpo {
const Gemm kAmxGemm = {};
bool amx_granted() { return false; }
}  // namespace grpo

#endif
#endif
