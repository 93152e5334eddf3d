// The forward of a linear head, one chunk of tokens at a time: pack the tokens, stream the
// vocabulary past them in splits, and merge the sums of the splits in order.
#include "linear.h"

#include <memory>
#include <new>

#include "threads.h"

namespace grpo {
namespace {

constexpr int64_t kLine = 64;  // bytes; an aligned vector is loaded from one line

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

// Prepared once for each token of the call, in whole groups.
struct Tokens {
  int64_t padded;
  Array<int32_t> target{padded};
  Array<float> score_scale{padded};

  void prepare(const Tile& tile) const {
    for (int64_t i = 0; i < padded; ++i) {
      const bool inside = i < tile.rows;
      target.get()[i] = inside ? int32_t(tile.target[i]) : -1;
      score_scale.get()[i] = inside ? Scores(tile, i).score_scale : 1;
    }
  }
};

// The workspace of a chunk; the next chunk reuses it.
struct Workspace {
  int64_t padded, splits, packed_bytes;
  int64_t sums = splits * padded;
  Array<char> packed{packed_bytes};
  Array<double> total{sums}, moment{sums}, squares{sums};
  Array<float> top{sums}, bottom{sums};
  Array<int32_t> best{sums};
  Array<float> u{padded};
  Array<int32_t> first{padded};

  Partials partials() const {
    return {total.get(), moment.get(), squares.get(), top.get(), bottom.get(), best.get()};
  }
  AtTarget at_target() const { return {u.get(), first.get()}; }
};

// A call; the threads of a team share its work.
struct Call {
  const Linear& linear;
  const LinearKernels& kernels;
  const Gemm& gemm;
  const Workspace& workspace;
  const Stats& out;

  void pack(Team& team, const Chunk& chunk) const {
    const int64_t panels = ceil_div(chunk.count, gemm.panel_tokens);
    for (int64_t panel; (panel = team.next(panels)) < panels;) {
      gemm.pack(linear, chunk, panel * gemm.panel_tokens, workspace.packed.get());
    }
  }

  void fold(Team& team, const Chunk& chunk, void* scratch, float* block) const {
    const int64_t columns = linear.tile.columns, splits = workspace.splits;
    const bool extras = out.is_top1 != nullptr;
    for (int64_t split; (split = team.next(splits)) < splits;) {
      const int64_t end = std::min((split + 1) * kSplitRows, columns);
      for (int64_t row = split * kSplitRows; row < end; row += kBlockRows) {
        const int64_t rows = std::min(kBlockRows, end - row);
        gemm.block(linear, chunk, row, rows, scratch, block);
        kernels.fold(linear, chunk, row, rows, block, workspace.partials(), split * chunk.padded,
                     extras, workspace.at_target());
      }
    }
  }

  void merge(Team& team, const Chunk& chunk) const {
    const int64_t groups = chunk.padded / kernels.lanes;
    for (int64_t group; (group = team.next(groups)) < groups;) {
      kernels.merge(linear, chunk, group * kernels.lanes, workspace.partials(),
                    workspace.at_target(), out);
    }
  }
};

// The useful number of threads: starting and joining one costs some tens of microseconds.
int64_t useful(const Linear& linear, int64_t threads) {
  constexpr int64_t kWorkPerThread = 1 << 21;  // multiply-adds
  constexpr int64_t kFold = 32;                // cost of folding a logit, in multiply-adds
  const int64_t work = linear.tile.rows * linear.tile.columns * (linear.depth + kFold);
  return std::min(threads, work / kWorkPerThread);
}

}  // namespace

void linear_stats(const Linear& linear, const Stats& out, const LinearKernels& kernels,
                  int32_t threads) {
  const Gemm& gemm = *kernels.gemm(linear.dtype);
  const int64_t tokens = linear.tile.rows;
  const auto padded = [&](int64_t count) { return ceil_div(count, kernels.lanes) * kernels.lanes; };
  const int64_t widest = padded(std::min(gemm.chunk_tokens, tokens));
  const int64_t splits = ceil_div(linear.tile.columns, kSplitRows);
  const Tokens prepared{padded(tokens)};
  prepared.prepare(linear.tile);
  const Workspace workspace{widest, splits, gemm.packed_bytes(linear, widest)};
  const Call call{linear, kernels, gemm, workspace, out};
  Team::run(std::min(useful(linear, threads), splits), [&](Team& team) {
    const Array<float> block(kBlockRows * widest);
    const Array<char> scratch(gemm.scratch_bytes(linear));
    for (int64_t begin = 0; begin < tokens; begin += gemm.chunk_tokens) {
      const int64_t count = std::min(gemm.chunk_tokens, tokens - begin);
      const Chunk chunk{begin,
                        count,
                        padded(count),
                        workspace.packed.get(),
                        prepared.target.get() + begin,
                        prepared.score_scale.get() + begin};
      {
        const FlushSubnormals flushed;
        call.pack(team, chunk);
        team.meet();
        call.fold(team, chunk, scratch.get(), block.get());
        team.meet();
      }
      call.merge(team, chunk);
      team.meet();
    }
  });
}

}  // namespace grpo
