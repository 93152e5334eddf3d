// All kernels of one instruction set. Before including this, a file defines GRPO_ISA, the
// namespace; GRPO_LANES, the floats of a vector; and GRPO_TARGET, the set's name for the compiler.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "entries.h"
#include "linear.h"
#include "target.h"

GRPO_TARGET_BEGIN

#include "convert-inl.h"
#include "divergence-inl.h"
#include "entries-inl.h"
#include "fold-inl.h"
#include "gemm_fp32-inl.h"
#include "row_kernels-inl.h"
#include "simd-inl.h"

namespace grpo::GRPO_ISA {

constexpr RowKernels row_kernels(const char* isa, const LinearKernels& linear = kLinear) {
  return {isa, stats, dlogits, divergence, &linear, &kEntries};
}

}  // namespace grpo::GRPO_ISA

GRPO_TARGET_END
