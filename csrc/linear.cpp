// The forward of a linear head, chunk of tokens by chunk: pack the tokens, let the vocabulary
// stream past in stretches, merge their sums in order.
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
  Workspace(const Linear& linear, const Product& product, int64_t padded)
      : sums(ceil_div(linear.tile.columns, kStretchRows) * padded),
        packed(product.packed_bytes(linear, padded)),
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

void pack_chunk(const Linear& linear, const Chunk& chunk, const Product& product, void* packed,
                int32_t threads) {
  constexpr int64_t kElementsPerThread = 1 << 17;
  const int64_t panels = ceil_div(chunk.count, product.panel_tokens);
  const int64_t useful = chunk.count * linear.depth / kElementsPerThread;
  share(panels, std::min<int64_t>(threads, useful), [&](const auto& next) {
    for (int64_t panel; (panel = next()) < panels;) {
      product.pack(linear, chunk, panel * product.panel_tokens, packed);
    }
  });
}

void fold_chunk(const Linear& linear, const Chunk& chunk, const LinearKernels& kernels,
                const Product& product, const Workspace& workspace, bool extras,
                int32_t threads) {
  const int64_t columns = linear.tile.columns;
  const int64_t stretches = ceil_div(columns, kStretchRows);
  share(stretches, threads, [&](const auto& next) {
    const Array<float> block(kBlockRows * chunk.padded);
    const Array<char> scratch(product.scratch_bytes(linear));
    for (int64_t stretch; (stretch = next()) < stretches;) {
      const int64_t end = std::min((stretch + 1) * kStretchRows, columns);
      for (int64_t row = stretch * kStretchRows; row < end; row += kBlockRows) {
        const int64_t rows = std::min(kBlockRows, end - row);
        product.block(linear, chunk, row, rows, scratch.get(), block.get());
        kernels.fold(linear, chunk, row, rows, block.get(), workspace.partials(),
                     stretch * chunk.padded, extras, workspace.at_target());
      }
    }
  });
}

}  // namespace

void linear_stats(const Linear& linear, const Stats& out, const LinearKernels& kernels,
                  int32_t threads) {
  const Product& product = *kernels.product(linear.dtype);
  const int64_t tokens = linear.tile.rows, lanes = kernels.lanes;
  const Workspace workspace(linear, product,
                            std::min(product.chunk_tokens, ceil_div(tokens, lanes) * lanes));
  for (int64_t begin = 0; begin < tokens; begin += product.chunk_tokens) {
    const int64_t count = std::min(product.chunk_tokens, tokens - begin);
    const Chunk chunk = workspace.chunk(linear, begin, count, ceil_div(count, lanes) * lanes);
    pack_chunk(linear, chunk, product, workspace.packed.get(), threads);
    fold_chunk(linear, chunk, kernels, product, workspace, out.is_top1 != nullptr, threads);
    for (int64_t at = 0; at < chunk.padded; at += lanes) {
      kernels.merge(linear, chunk, at, workspace.partials(), workspace.at_target(), out);
    }
  }
}

}  // namespace grpo
