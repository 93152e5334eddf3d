// A vector of GRPO_LANES floats in the compiler's own vector types, with exp and tanh.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef GRPO_ISA  // the set that every machine has; also for editors
#define GRPO_ISA baseline
#define GRPO_LANES 4
#endif

#define GRPO_INLINE_MEMBER __attribute__((always_inline))
#define GRPO_INLINE static inline GRPO_INLINE_MEMBER

namespace grpo::GRPO_ISA {

constexpr int64_t kLanes = GRPO_LANES;
typedef float Float __attribute__((vector_size(4 * GRPO_LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * GRPO_LANES)));
typedef double Doubles __attribute__((vector_size(8 * GRPO_LANES)));
typedef uint64_t LongBits __attribute__((vector_size(8 * GRPO_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * GRPO_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * GRPO_LANES)));

GRPO_INLINE Float splat(float value) { return value - Float{}; }

// max(x, floor); NaN passes through. In this order it is one instruction.
GRPO_INLINE Float at_least(Float x, float floor) {
  const Float least = splat(floor);
  return least > x ? least : x;
}

// NaN is skipped: the sums carry it.
GRPO_INLINE Float max(Float x, Float best) { return x > best ? x : best; }

GRPO_INLINE float max(Float x) {
  float best = x[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) best = x[lane] > best ? x[lane] : best;
  return best;
}

GRPO_INLINE Doubles widen(Float x) { return __builtin_convertvector(x, Doubles); }

GRPO_INLINE double sum(Doubles x) {
  double total = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) total += x[lane];
  return total;
}

// exp of a score relative to a maximum is 0 at or below this: the smallest argument with a normal
// float as its exponential.
constexpr float kExpFloor = -87.336f;

// e^x as power * (1 + rest), for x in [kExpFloor, 88].
struct Exponential {
  Float power, rest;
};

// With n = round(x / ln 2) and r = x - n ln 2 the power is 2^n, and the rest r + r^2 P(r). P is the
// polynomial of degree 4, by a Remez exchange, with the least maximum of |r + r^2 P(r) - (e^r - 1)|
// on |r| <= ln(2) / 2, which is 3e-9; its coefficients are rounded to fp32.
GRPO_INLINE Exponential exponential(Float x) {
  constexpr float kRound = 0x1.8p23f;  // the sum's low mantissa bits are the rounded integer
  Float n = x * 1.44269504f + kRound;
  const Float power = (Float)(((Bits)n << 23) + 0x3f800000u);
  n -= kRound;
  const Float r = (x - n * 0.69140625f) - n * 0.0017409306f;  // the first product is exact
  Float p = r * 0.0013950479f + 0.008368882f;
  p = p * r + 0.041666206f;
  p = p * r + 0.1666652f;
  p = p * r + 0.5f;
  return {power, (p * r) * r + r};
}

// e^x to about 1 ulp for x in [kExpFloor, 88], exactly 0 at kExpFloor, NaN for NaN; 0 where `zero`
// is set.
GRPO_INLINE Float exp(Float x, Ints zero) {
  const Exponential e = exponential(x);
  return zero ? Float{} : (e.rest + 1.0f) * e.power;
}

GRPO_INLINE Float exp(Float x) { return exp(x, x <= kExpFloor); }

// tanh to about 2 ulp, +-1 at +-inf, NaN for NaN. Small arguments: x (1 + y P(y)) with y = x^2, and
// P found as in `exponential`, for |1 + y P(y) - tanh(x) / x| on y <= 0.55^2, which is 1e-9.
// Otherwise 1 - 2 / (e^(2|x|) + 1).
GRPO_INLINE Float tanh(Float x) {
  const Bits sign = (Bits)x & 0x80000000u;
  const Float size = (Float)((Bits)x ^ sign);
  const Float y = x * x;
  Float p = y * -0.0062824734f + 0.021077758f;
  p = p * y - 0.05385386f;
  p = p * y + 0.13332602f;
  p = p * y - 0.3333332f;
  const Float small = size + size * (y * p);
  const Float bounded = size > 10.0f ? splat(10.0f) : size;  // tanh(10) rounds to 1
  const Float large = 1.0f - 2.0f / (exp(bounded + bounded) + 1.0f);
  const Float result = size < 0.55f ? small : large;
  return (Float)((Bits)result | sign);
}

// e^x to about 1e-15 for x <= 0; 0 below -708, NaN for NaN. The same scheme, with Taylor's series.
GRPO_INLINE Doubles exp(Doubles x) {
  constexpr double kRound = 0x1.8p52;
  const Doubles bounded = x < -708.0 ? Doubles{} - 708.0 : x;
  Doubles n = bounded * 1.4426950408889634 + kRound;
  const LongBits power = ((LongBits)n << 52) + (1023ull << 52);
  n -= kRound;
  const Doubles r = (bounded - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;
  Doubles p = Doubles{} + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return x < -708.0 ? Doubles{} : p * (Doubles)power;
}

// Returns whether any bit is set.
GRPO_INLINE bool any(Bits x) {
  uint64_t words[sizeof(Bits) / 8], all = 0;
  std::memcpy(words, &x, sizeof(x));
  for (const uint64_t word : words) all |= word;
  return all != 0;
}

}  // namespace grpo::GRPO_ISA
