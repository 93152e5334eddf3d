// The kernels in eight lanes, for AVX2 with fused multiply-add.
#if defined(__x86_64__)
#define GRPO_ISA avx2
#define GRPO_LANES 8
#define GRPO_TARGET "avx2,fma"
#include "isa-inl.h"

namespace grpo {
constexpr RowKernels kAvx2 = avx2::row_kernels("avx2");
}
#endif
