// Distributes products with entries over threads.
#include <cstring>
#include <memory>

#include "entries.h"
#include "threads.h"

namespace grpo {
namespace {

constexpr int64_t kMaxLanes = 16;

// Memory for the sums of a row of the product, in whole vectors.
std::unique_ptr<float[]> room(const Product& product) {
  return std::unique_ptr<float[]>(new float[product.width + kMaxLanes]);
}

// The useful number of threads for this many multiplications.
int64_t useful(int64_t threads, int64_t numbers) {
  constexpr int64_t kNumbersPerThread = 1 << 16;
  return std::min(threads, numbers / kNumbersPerThread);
}

int64_t count_entries(const Entries& entries) {
  int64_t count = 0;
  for (int64_t row = 0; row < entries.rows; ++row) count += std::max(entries.used[row], 0);
  return count;
}

template <class Work>
void for_each_entry(const Entries& entries, int64_t row, const Work& work) {
  for (int64_t k = row * entries.slots; k < row * entries.slots + entries.used[row]; ++k) {
    work(entries.ids[k], entries.values[k]);
  }
}

// All entries, sorted by column, then by row.
struct Columns {
  std::vector<int64_t> starts;
  std::unique_ptr<Summand[]> summands;

  Columns(const Entries& entries, const Product& product)
      : starts(product.out_rows + 1), summands(new Summand[count_entries(entries)]) {
    for (int64_t row = 0; row < entries.rows; ++row) {
      for_each_entry(entries, row, [&](int32_t column, float) { ++starts[column]; });
    }
    int64_t before = 0;
    for (int64_t& start : starts) {
      before += start;
      start = before;  // the end, for now; it moves to the start as entries are placed
    }
    for (int64_t row = entries.rows; row-- > 0;) {
      const float factor = product.factor[row];
      for_each_entry(entries, row, [&](int32_t column, float value) {
        summands[--starts[column]] = {int32_t(row), value * factor};
      });
    }
  }
};

int64_t bytes_of(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

}  // namespace

void matmul(const Entries& entries, const Product& product, const EntryKernels& kernels,
            int32_t threads) {
  const int64_t workers = useful(threads, count_entries(entries) * product.width);
  Team::run(std::min(entries.rows, workers), [&](Team& team) {
    const FlushSubnormals flushed;
    const auto sums = room(product);
    const std::unique_ptr<Summand[]> summands(new Summand[entries.slots]);
    for (int64_t row; (row = team.next(entries.rows)) < entries.rows;) {
      if (entries.used[row] < 0) continue;
      Summand* end = summands.get();
      for_each_entry(entries, row, [&](int32_t column, float value) {
        *end++ = {column, value * product.factor[row]};
      });
      kernels.combine(product, summands.get(), end - summands.get(), row, sums.get());
    }
  });
}

void transposed_matmul(const Entries& entries, const Product& product, const EntryKernels& kernels,
                       int32_t threads) {
  constexpr int64_t kRange = 64;  // rows of the output per work item of a thread
  const Columns columns(entries, product);
  const int64_t ranges = (product.out_rows + kRange - 1) / kRange;
  const int64_t row_bytes = bytes_of(product.out_dtype) * product.width;
  const int64_t workers = useful(threads, product.out_rows * product.width);
  Team::run(std::min(ranges, workers), [&](Team& team) {
    const FlushSubnormals flushed;
    const auto sums = room(product);
    for (int64_t range; (range = team.next(ranges)) < ranges;) {
      const int64_t end = std::min((range + 1) * kRange, product.out_rows);
      for (int64_t row = range * kRange; row < end; ++row) {
        const int64_t first = columns.starts[row], count = columns.starts[row + 1] - first;
        if (count > 0) {
          kernels.combine(product, columns.summands.get() + first, count, row, sums.get());
        } else if (!product.add) {
          const int64_t stride = bytes_of(product.out_dtype) * product.out_stride;
          std::memset(static_cast<char*>(product.out) + row * stride, 0, row_bytes);
        }
      }
    }
  });
}

}  // namespace grpo
