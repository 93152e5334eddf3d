// The row kernels in eight lanes, for AVX2 with fused multiply-add.
#if defined(__x86_64__)
#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "entries.h"
#include "linear.h"

#define GRPO_LANES 8

// From here on only: functions of the headers above must stay callable on every machine.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

namespace grpo::avx2 {
#include "simd-inl.h"
#include "convert-inl.h"
#include "row_kernels-inl.h"
#include "divergence-inl.h"
#include "gemm_fp32-inl.h"
#include "fold-inl.h"
#include "entries-inl.h"
}  // namespace grpo::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace grpo {
const RowKernels kAvx2 = {"avx2", avx2::stats, avx2::dlogits, avx2::divergence, &avx2::kLinear, &avx2::kEntries};
}
#endif
