// Row kernels over a tile of logits: the C ABI, and the table of kernels of an instruction set.
//
// Pointers are raw and borrowed for the call. Strides count elements, not bytes. Statistics are
// fp32, except lse: at 1e4, rounding it to fp32 would change every probability by 5e-4.
// `grpo_kernels/backends/native_library.py` mirrors the structs of the C ABI, and compares their
// sizes with grpo_struct_size when it loads the library.
//
// A row's scores are z = score_scale * u, where u is the logit, or with a softcap
// tanh(cap_scale * logit). The softmax takes one pass, relative to an anchor, the largest u so far:
//
//   d        score_scale * (u - anchor)
//   total    the sum of exp(d)
//   moment   the sum of d exp(d)
//   squares  the sum of exp(d)^2
//   top      the largest u; bottom: the smallest
//   lse      the logarithm of the sum of exp(z)
//
//   Terms         sums of a few terms, in fp32           row_kernels-inl.h
//   SoftmaxSums   sums of these, in fp64                 row_kernels-inl.h
//   RowSums       of one row; lanes are columns          row_kernels-inl.h
//   GroupSums     of a group of rows; lanes are rows     fold-inl.h
//   Partials      GroupSums of each split, in memory     linear.h
//   Totals        of a whole row                         row_kernels-inl.h
#pragma once

#include <cstdint>

namespace grpo {

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// (rows, columns) logits, and their transform to scores:
// z = softcap * tanh(logit_scale * logit / softcap) / temperature, or without a softcap
// z = logit_scale * logit / temperature. All three parameters are positive.
struct Tile {
  void* logits;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  const int64_t* target;         // (rows,); in dlogits one outside [0, columns) is no target here
  const float* row_temperature;  // (rows,), or null: use `temperature` for every row
  double temperature;
  double logit_scale;
  double softcap;  // 0: none
  int32_t dtype;
};

struct Stats {
  float* logp;          // (rows,)
  float* entropy;       // (rows,) nats
  double* lse;          // (rows,)
  bool* is_top1;        // (rows,), or null, like the following
  float* sum_sq_probs;  // (rows,), or null
  float* max_logit;     // (rows,) of the scores, or null
  float* min_logit;     // (rows,) of the scores, or null
};

// Inputs of a tile's gradient in addition to the tile. The result may overwrite the logits.
struct Gradient {
  const float* logp;      // (rows,)
  const float* entropy;   // (rows,)
  const double* lse;      // (rows,)
  const float* dlogp;     // (rows,)
  const float* dentropy;  // (rows,), or null: zero
  void* out;              // (rows, columns)
  int64_t out_stride;     // elements
  int32_t out_dtype;      // the tile's dtype, or a 16-bit one for fp32 logits
};

enum DivergenceKind : int32_t { kForwardKl = 0, kReverseKl = 1, kJsd = 2 };

// Inputs of a divergence, or of its gradient, in addition to the student's tile. The teacher's tile
// has the same shape.
struct Divergence {
  Tile teacher;
  const double* lse;           // (rows,)
  const double* teacher_lse;   // (rows,)
  double* sums;                // (2, rows), sums of the terms and of logp_grad; null: gradient
  const double* logp_grad_sum;  // (rows,) the second of these sums, over whole rows
  const float* coefficient;    // (rows,)
  void* out;                   // (rows, columns)
  int64_t out_stride;          // elements
  double beta;                 // of kJsd
  int32_t kind, out_dtype;
};

// The scores of one row.
struct Scores {
  bool softcapped;
  float cap_scale;
  float score_scale;
  float dlogit;  // dz / dlogit, without the tanh's derivative

  Scores(const Tile& tile, int64_t row) {
    const double t = tile.row_temperature ? tile.row_temperature[row] : tile.temperature;
    softcapped = tile.softcap != 0;
    cap_scale = softcapped ? float(tile.logit_scale / tile.softcap) : 1.0f;
    dlogit = float(tile.logit_scale / t);
    score_scale = softcapped ? float(tile.softcap / t) : dlogit;
  }
};

// The status that C functions return: their results are complete, or must not be read.
enum Status : int32_t { kDone = 0, kOutOfMemory = 1 };

struct LinearKernels;  // linear.h
struct EntryKernels;   // entries.h

// Each handles one row. Rows share nothing, so a result does not depend on other rows or on
// threads.
struct RowKernels {
  const char* isa;
  void (*stats)(const Tile&, const Stats&, int64_t row);
  void (*dlogits)(const Tile&, const Gradient&, int64_t row);
  void (*divergence)(const Tile&, const Divergence&, int64_t row);
  const LinearKernels* linear;
  const EntryKernels* entries;
};

extern const RowKernels kBaseline;
#if defined(__x86_64__)
extern const RowKernels kAvx2;
extern const RowKernels kAvx512;
extern const RowKernels kAmx, kAvx512Bf16;  // kAvx512 with other GEMMs for bf16
#endif

}  // namespace grpo
