// The row kernels in sixteen lanes, for AVX-512.
#if defined(__x86_64__)
#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "entries.h"
#include "linear.h"

#define GRPO_LANES 16

// From here on only: functions of the headers above must stay callable on every machine.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#endif

namespace grpo::avx512 {
#include "simd-inl.h"
#include "convert-inl.h"
#include "row_kernels-inl.h"
#include "divergence-inl.h"
#include "gemm_fp32-inl.h"
#include "fold-inl.h"
#include "entries-inl.h"
}  // namespace grpo::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace grpo {
const RowKernels kAvx512 = {"avx512", avx512::stats, avx512::dlogits, avx512::divergence, &avx512::kLinear,
                            &avx512::kEntries};

namespace {
template <const Gemm& kOfBf16>
const Gemm* gemm(int32_t dtype) {
  return dtype == kBFloat16 ? &kOfBf16 : avx512::gemm(dtype);
}
template <const Gemm& kOfBf16>
constexpr LinearKernels kLinear = {avx512::kLanes, gemm<kOfBf16>, avx512::fold, avx512::merge};
}  // namespace

const RowKernels kAmx = {"amx", avx512::stats, avx512::dlogits, avx512::divergence, &kLinear<kAmxGemm>,
                         &avx512::kEntries};
const RowKernels kAvx512Bf16 = {"avx512_bf16", avx512::stats, avx512::dlogits, avx512::divergence,
                                &kLinear<kBf16Gemm>, &avx512::kEntries};
}
#endif
