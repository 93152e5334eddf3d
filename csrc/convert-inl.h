// Loads and stores of the tile dtypes, by plain bit operations, which run anywhere.
#pragma once

#include <cstring>

#include "rows.h"
#include "simd-inl.h"

namespace grpo::GRPO_ISA {

GRPO_INLINE Float load(const float* source) {
  Float x;
  std::memcpy(&x, source, sizeof(x));
  return x;
}

GRPO_INLINE Bits load_halves(const void* source) {
  Halves x;
  std::memcpy(&x, source, sizeof(x));
  return __builtin_convertvector(x, Bits);
}

GRPO_INLINE Float from_bfloat16(Bits half) { return (Float)(half << 16); }

GRPO_INLINE Float from_float16(Bits half) {
  const Bits magnitude = (half & 0x7fffu) << 13;
  const Bits exponent = magnitude & 0x0f800000u;
  const Bits rebiased = magnitude + (112u << 23);
  // Subnormal: as 2^-14 (1 + fraction), less the 2^-14.
  const Bits subnormal = (Bits)((Float)(rebiased + (1u << 23)) - 0x1p-14f);
  const Bits special = magnitude + (224u << 23);  // inf and NaN
  Bits x = exponent == 0u ? subnormal : rebiased;
  x = exponent == 0x0f800000u ? special : x;
  return (Float)(x | ((half & 0x8000u) << 16));
}

GRPO_INLINE Float load(const BFloat16* source) { return from_bfloat16(load_halves(source)); }
GRPO_INLINE Float load(const Float16* source) { return from_float16(load_halves(source)); }

GRPO_INLINE void store(float* target, Float x) { std::memcpy(target, &x, sizeof(x)); }

GRPO_INLINE void store_halves(void* target, Bits x) {
  const Halves narrow = __builtin_convertvector(x, Halves);
  std::memcpy(target, &narrow, sizeof(narrow));
}

// bf16 and fp16 in the low halves. Rounds to nearest, ties to even; fp16 overflows to inf.
GRPO_INLINE Bits bfloat16_bits(Float x) {
  const Bits bits = (Bits)x;
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return x != x ? (bits >> 16) | 0x40u : rounded;
}

GRPO_INLINE Bits float16_bits(Float x) {
  const Bits sign = (Bits)x & 0x80000000u;
  const Bits magnitude = (Bits)x ^ sign;
  const Bits normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // An ulp of a float in [0.5, 1) is the spacing of the fp16 subnormals: the addition rounds.
  const Bits subnormal = (Bits)((Float)magnitude + 0.5f) - 0x3f000000u;
  const Bits huge = magnitude > 0x7f800000u ? Bits{} + 0x7e00u : Bits{} + 0x7c00u;
  Bits half = magnitude < 0x38800000u ? subnormal : normal;  // below 2^-14
  half = magnitude >= 0x47800000u ? huge : half;             // from 2^16
  return half | (sign >> 16);
}

GRPO_INLINE void store(BFloat16* target, Float x) { store_halves(target, bfloat16_bits(x)); }
GRPO_INLINE void store(Float16* target, Float x) { store_halves(target, float16_bits(x)); }

GRPO_INLINE Float to_bfloat16(Float x) { return from_bfloat16(bfloat16_bits(x)); }
GRPO_INLINE Float to_float16(Float x) { return from_float16(float16_bits(x)); }

// Calls work(element) with an element of the type for a tile's dtype.
template <class Work>
GRPO_INLINE auto with_dtype(int32_t dtype, const Work& work) {
  switch (dtype) {
    case kFloat32: return work(float{});
    case kBFloat16: return work(BFloat16{});
    case kFloat16: return work(Float16{});
  }
  __builtin_unreachable();  // native_library.py passes no other value
}

// The first `count` < kLanes lanes; the others are `fill`, and nothing beyond `count` is read.
template <class T>
GRPO_INLINE Float load_some(const T* source, int64_t count, float fill) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, source, count * sizeof(T));
  Float x = load(lanes);
  for (int64_t lane = count; lane < kLanes; ++lane) x[lane] = fill;
  return x;
}

template <class T>
GRPO_INLINE void store_some(T* target, Float x, int64_t count) {
  T lanes[kLanes];
  store(lanes, x);
  std::memcpy(target, lanes, count * sizeof(T));
}

// All lanes, or the first `count` if there are fewer.
template <class T>
GRPO_INLINE void store_lanes(T* target, Float x, int64_t count) {
  if (count >= kLanes) {
    store(target, x);
  } else {
    store_some(target, x, count);
  }
}

}  // namespace grpo::GRPO_ISA
