// The forward of a linear head, chunk of tokens by chunk: pack the tokens, let the vocabulary
// stream past in splits, merge the sums of these in order.
#include "linear.h"

#include <memory>
#include <new>

#include "threads.h"

namespace grpo {
namespace {

constexpr int64_t kLine = 64;  // bytes; a vector that starts on one is loaded whole

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
class Array {
 public:
  explicit Array(int64_t size)
      : start_(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t(kLine)))) {}
  T* get() const { return start_.get(); }

 private:
  struct Free {
    void operator()(T* start) const { ::operator delete(start, std::align_val_t(kLine)); }
  };
  std::unique_ptr<T, Free> start_;
};

// What one chunk needs; the next uses it again.
class Workspace {
 public:
  Workspace(const Linear& linear, const Gemm& gemm, int64_t padded)
      : sums(ceil_div(linear.tile.columns, kSplitRows) * padded),
        packed(gemm.packed_bytes(linear, padded)),
        target(padded),
        slope(padded),
        u(padded),
        first(padded),
        e(sums),
        ed(sums),
        ee(sums),
        top(sums),
        bottom(sums),
        best(sums) {}

  Chunk chunk(const Linear& linear, int64_t begin, int64_t count, int64_t padded) const {
    for (int64_t i = 0; i < padded; ++i) {
      const bool inside = i < count;
      target.get()[i] = inside ? int32_t(linear.tile.target[begin + i]) : -1;
      slope.get()[i] = inside ? Scores(linear.tile, begin + i).slope : 1;
    }
    return {begin, count, padded, packed.get(), target.get(), slope.get()};
  }
  Partials partials() const {
    return {e.get(), ed.get(), ee.get(), top.get(), bottom.get(), best.get()};
  }
  AtTarget at_target() const { return {u.get(), first.get()}; }

 private:
  int64_t sums;

 public:
  Array<char> packed;

 private:
  Array<int32_t> target;
  Array<float> slope, u;
  Array<int32_t> first;
  Array<double> e, ed, ee;
  Array<float> top, bottom;
  Array<int32_t> best;
};

void pack_chunk(const Linear& linear, const Chunk& chunk, const Gemm& gemm, void* packed,
                int32_t threads) {
  constexpr int64_t kElementsPerThread = 1 << 17;
  const int64_t panels = ceil_div(chunk.count, gemm.panel_tokens);
  const int64_t useful = chunk.count * linear.depth / kElementsPerThread;
  share(panels, std::min<int64_t>(threads, useful), [&](const auto& next) {
    for (int64_t panel; (panel = next()) < panels;) {
      gemm.pack(linear, chunk, panel * gemm.panel_tokens, packed);
    }
  });
}

void fold_chunk(const Linear& linear, const Chunk& chunk, const LinearKernels& kernels,
                const Gemm& gemm, const Workspace& workspace, bool extras,
                int32_t threads) {
  const int64_t columns = linear.tile.columns;
  const int64_t splits = ceil_div(columns, kSplitRows);
  share(splits, threads, [&](const auto& next) {
    const Array<float> block(kBlockRows * chunk.padded);
    const Array<char> scratch(gemm.scratch_bytes(linear));
    for (int64_t split; (split = next()) < splits;) {
      const int64_t end = std::min((split + 1) * kSplitRows, columns);
      for (int64_t row = split * kSplitRows; row < end; row += kBlockRows) {
        const int64_t rows = std::min(kBlockRows, end - row);
        gemm.block(linear, chunk, row, rows, scratch.get(), block.get());
        kernels.fold(linear, chunk, row, rows, block.get(), workspace.partials(),
                     split * chunk.padded, extras, workspace.at_target());
      }
    }
  });
}

}  // namespace

void linear_stats(const Linear& linear, const Stats& out, const LinearKernels& kernels,
                  int32_t threads) {
  const Gemm& gemm = *kernels.gemm(linear.dtype);
  const int64_t tokens = linear.tile.rows, lanes = kernels.lanes;
  const Workspace workspace(linear, gemm,
                            std::min(gemm.chunk_tokens, ceil_div(tokens, lanes) * lanes));
  for (int64_t begin = 0; begin < tokens; begin += gemm.chunk_tokens) {
    const int64_t count = std::min(gemm.chunk_tokens, tokens - begin);
    const Chunk chunk = workspace.chunk(linear, begin, count, ceil_div(count, lanes) * lanes);
    pack_chunk(linear, chunk, gemm, workspace.packed.get(), threads);
    fold_chunk(linear, chunk, kernels, gemm, workspace, out.is_top1 != nullptr, threads);
    for (int64_t at = 0; at < chunk.padded; at += lanes) {
      kernels.merge(linear, chunk, at, workspace.partials(), workspace.at_target(), out);
    }
  }
}

}  // namespace grpo
