// The entries of a row's gradient that matter, and products with them: the C ABI, and the kernels
// of an instruction set. `grpo_kernels/backends/entries.py` defines entries and how they are
// chosen; `grpo_kernels/backends/native_library.py` mirrors the structs of the ABI.
#pragma once

#include "rows.h"

namespace grpo {

// Row t has the first used[t] of its `slots` entries; -1: none, the row is computed whole.
struct Entries {
  int32_t* ids;    // (rows, slots)
  float* values;   // (rows, slots)
  int32_t* used;   // (rows,)
  int64_t rows;
  int64_t slots;
};

// Entries are of the gradient of log-probabilities, or of a loss with these gradients.
struct GradStats {
  const float* entropy;   // (rows,), or null with the rest
  const float* dlogp;     // (rows,)
  const float* dentropy;  // (rows,)
};

// Inputs of the choice in addition to the tile, and its result.
struct Extraction {
  GradStats grad_stats;
  const float* logp;    // (rows,)
  const double* lse;    // (rows,)
  const int32_t* keys;  // (rows,)
  const float* cuts;    // (rows,)
  Entries out;
  float* error;           // (rows,)
  float* error_l1;        // (rows,)
  float* expected_error;  // (rows,)
  float* norm;            // (rows,)
};

// Sums over some blocks of each row: of sizes up to each cut, and of their squares.
struct TailSums {
  GradStats grad_stats;
  const double* lse;    // (rows,)
  const float* weight;  // (rows,), factor of a row's sizes
  const float* cuts;    // (num_cuts,), ascending
  float* sums;          // (rows, 2, num_cuts)
  int64_t num_cuts;
  int64_t blocks;   // blocks of kStrands columns in a row
  int64_t sampled;  // how many of them are read
};

// A product with entries, each times its row's factor.
struct Product {
  const float* factor;  // (entries.rows,)
  const void* source;   // (rows, width)
  void* out;            // (out_rows, width)
  int64_t source_stride;
  int64_t out_rows;
  int64_t out_stride;
  int64_t width;
  int32_t source_dtype;
  int32_t out_dtype;  // the source's, or fp32
  int32_t add;        // to `out`
};

// A summand in a row of a product: a row of the source, and its factor.
struct Summand {
  int32_t row;
  float weight;
};

constexpr int64_t kStrands = 2048;  // as in `grpo_kernels/backends/entries.py`
constexpr int32_t kWhole = -1;
constexpr float kAnyError = 1e30f;  // a cut of this or more: the row has no gradient

struct EntryKernels {
  void (*extract)(const Tile&, const Extraction&, int64_t row);
  void (*tail_sums)(const Tile&, const TailSums&, int64_t row);
  // Writes the sum of `count` summands to `row` of the product's output; `sums` has room for a row.
  void (*combine)(const Product&, const Summand*, int64_t count, int64_t row, float* sums);
};

void matmul(const Entries&, const Product&, const EntryKernels&, int32_t threads);
void transposed_matmul(const Entries&, const Product&, const EntryKernels&, int32_t threads);

}  // namespace grpo
