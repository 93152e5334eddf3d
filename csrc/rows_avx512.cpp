// The kernels in sixteen lanes, for AVX-512; also with special GEMMs for bf16.
#if defined(__x86_64__)
#define GRPO_ISA avx512
#define GRPO_LANES 16
#define GRPO_TARGET "avx512f,avx512bw,avx512dq,avx512vl,fma"
#include "isa-inl.h"

namespace grpo {
namespace {

template <const Gemm& kOfBf16>
const Gemm* gemm(int32_t dtype) {
  return dtype == kBFloat16 ? &kOfBf16 : avx512::gemm(dtype);
}

template <const Gemm& kOfBf16>
constexpr LinearKernels kLinear = {avx512::kLanes, gemm<kOfBf16>, avx512::fold, avx512::merge};

}  // namespace

constexpr RowKernels kAvx512 = avx512::row_kernels("avx512");
constexpr RowKernels kAmx = avx512::row_kernels("amx", kLinear<kAmxGemm>);
constexpr RowKernels kAvx512Bf16 = avx512::row_kernels("avx512_bf16", kLinear<kBf16Gemm>);

}  // namespace grpo
#endif
