// The row kernels in four lanes: SSE2 on x86-64, NEON on aarch64, plain code elsewhere.
#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "entries.h"
#include "linear.h"

#define GRPO_LANES 4

namespace grpo::baseline {
#include "simd-inl.h"
#include "convert-inl.h"
#include "row_kernels-inl.h"
#include "divergence-inl.h"
#include "gemm_fp32-inl.h"
#include "fold-inl.h"
#include "entries-inl.h"
}  // namespace grpo::baseline

namespace grpo {
const RowKernels kBaseline = {"baseline", baseline::stats, baseline::dlogits, baseline::divergence, &baseline::kLinear,
                              &baseline::kEntries};
}
