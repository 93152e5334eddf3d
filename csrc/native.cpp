// The C entry points: choose the instruction set, and spread the rows over threads. They throw no
// exceptions.
#include <memory>
#include <string_view>
#include <utility>

#include "entries.h"
#include "linear.h"
#include "threads.h"

#if defined(_WIN32)
#define GRPO_EXPORT extern "C" __declspec(dllexport)
#else
#define GRPO_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace grpo {
namespace {

// The kernels that this machine can run, best first.
std::vector<const RowKernels*> runnable() {
  std::vector<const RowKernels*> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    if (amx_granted()) found.push_back(&kAmx);
    if (has_bf16()) found.push_back(&kAvx512Bf16);
    found.push_back(&kAvx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&kAvx2);
#endif
  found.push_back(&kBaseline);
  return found;
}

const std::vector<const RowKernels*>& kernels() {
  static const std::vector<const RowKernels*> found = runnable();
  return found;
}

// The useful number of threads for a tile.
int64_t useful(const Tile& tile, int32_t threads) {
  constexpr int64_t kElementsPerThread = 1 << 16;
  return std::min<int64_t>(threads, tile.rows * tile.columns / kElementsPerThread);
}

template <class Work>
void for_each_row(const Tile& tile, int32_t threads, const Work& work) {
  Team::run(std::min(tile.rows, useful(tile, threads)), [&](Team& team) {
    const FlushSubnormals flushed;
    for (int64_t row; (row = team.next(tile.rows)) < tile.rows;) work(row);
  });
}

template <class Work>
Status status_of(const Work& work) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
  return kDone;
}

}  // namespace
}  // namespace grpo

// The bytes of a struct of the C ABI, by name; 0 for an unknown name.
GRPO_EXPORT int64_t grpo_struct_size(const char* name) {
  using namespace grpo;
#define GRPO_SIZE(type) {#type, sizeof(type)}
  static constexpr std::pair<std::string_view, int64_t> sizes[] = {
      GRPO_SIZE(Tile),       GRPO_SIZE(Stats),    GRPO_SIZE(Gradient), GRPO_SIZE(Divergence),
      GRPO_SIZE(Update),     GRPO_SIZE(Linear),   GRPO_SIZE(Entries),  GRPO_SIZE(GradStats),
      GRPO_SIZE(Extraction), GRPO_SIZE(TailSums), GRPO_SIZE(Product)};
#undef GRPO_SIZE
  for (const auto& [type, bytes] : sizes) {
    if (type == name) return bytes;
  }
  return 0;
}

GRPO_EXPORT int64_t grpo_threads_started() { return grpo::threads_started; }

// The name of this machine's rank-th best instruction set, from 0; null past the last.
GRPO_EXPORT const char* grpo_isa(int32_t rank) {
  const auto& found = grpo::kernels();
  return rank < static_cast<int32_t>(found.size()) ? found[rank]->isa : nullptr;
}

GRPO_EXPORT int32_t grpo_stats(const grpo::Tile* tile, const grpo::Stats* out, int32_t rank,
                               int32_t threads) {
  const auto kernel = grpo::kernels()[rank]->stats;
  return grpo::status_of([&] {
    grpo::for_each_row(*tile, threads, [&](int64_t row) { kernel(*tile, *out, row); });
  });
}

GRPO_EXPORT int32_t grpo_dlogits(const grpo::Tile* tile, const grpo::Gradient* grad, int32_t rank,
                                 int32_t threads) {
  const auto kernel = grpo::kernels()[rank]->dlogits;
  return grpo::status_of([&] {
    grpo::for_each_row(*tile, threads, [&](int64_t row) { kernel(*tile, *grad, row); });
  });
}

GRPO_EXPORT int32_t grpo_divergence(const grpo::Tile* tile, const grpo::Divergence* divergence,
                                    int32_t rank, int32_t threads) {
  const auto kernel = grpo::kernels()[rank]->divergence;
  return grpo::status_of([&] {
    grpo::for_each_row(*tile, threads, [&](int64_t row) { kernel(*tile, *divergence, row); });
  });
}

// Fills the results that `out` has pointers for, and the tile of logits if `linear` has one.
GRPO_EXPORT int32_t grpo_linear(const grpo::Linear* linear, const grpo::Stats* out, int32_t rank,
                                int32_t threads) {
  const auto* kernels = grpo::kernels()[rank]->linear;
  return grpo::status_of([&] { grpo::linear_stats(*linear, *out, *kernels, threads); });
}

GRPO_EXPORT int32_t grpo_extract(const grpo::Tile* tile, const grpo::Extraction* extraction,
                                 int32_t rank, int32_t threads) {
  const auto kernel = grpo::kernels()[rank]->entries->extract;
  return grpo::status_of([&] {
    grpo::for_each_row(*tile, threads, [&](int64_t row) { kernel(*tile, *extraction, row); });
  });
}

GRPO_EXPORT int32_t grpo_tail_sums(const grpo::Tile* tile, const grpo::TailSums* of, int32_t rank,
                                   int32_t threads) {
  const auto kernel = grpo::kernels()[rank]->entries->tail_sums;
  return grpo::status_of([&] {
    grpo::for_each_row(*tile, threads, [&](int64_t row) { kernel(*tile, *of, row); });
  });
}

GRPO_EXPORT int32_t grpo_matmul(const grpo::Entries* entries, const grpo::Product* product,
                                int32_t rank, int32_t threads) {
  const auto* kernels = grpo::kernels()[rank]->entries;
  return grpo::status_of([&] { grpo::matmul(*entries, *product, *kernels, threads); });
}

GRPO_EXPORT int32_t grpo_transposed_matmul(const grpo::Entries* entries,
                                           const grpo::Product* product, int32_t rank,
                                           int32_t threads) {
  const auto* kernels = grpo::kernels()[rank]->entries;
  return grpo::status_of([&] { grpo::transposed_matmul(*entries, *product, *kernels, threads); });
}
