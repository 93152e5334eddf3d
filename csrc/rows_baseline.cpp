// The kernels in four lanes: SSE2 on x86-64, NEON on aarch64, plain code elsewhere.
#include "isa-inl.h"

namespace grpo {
constexpr RowKernels kBaseline = baseline::row_kernels("baseline");
}
