// Statistics of a linear head without its logits in memory: the C ABI, and the kernels of an
// instruction set.
//
// Logits are computed transposed, with tokens side by side in a vector, so that every sum over the
// vocabulary is a sum of vectors. A block of logits stays in the cache between GEMM and fold:
//
//   block[group][row][lane]: vocabulary row `row`, token `group * lanes + lane`
//
// Tokens share nothing, and the vocabulary is cut at the same places for any number of tokens: the
// bits of a token's results do not depend on other tokens or on threads.
#pragma once

#include "rows.h"

namespace grpo {

constexpr int64_t kBlockRows = 128;   // vocabulary rows of a block
constexpr int64_t kSplitRows = 1024;  // whole blocks, folded by one thread

// A low-rank update of the logits: logits += lora_u^T @ lora_b^T. A vector of tokens can be loaded
// at any whole group.
struct Update {
  const float* lora_u;  // (rank, tokens), or null: no update
  const float* lora_b;  // (columns, rank)
  int64_t lora_u_stride;
  int64_t rank;  // a multiple of kRankStep
};

constexpr int64_t kRankStep = 8;  // vectors of `lora_u` that stay in registers

// logits = hidden @ weight^T + update + bias.
struct Linear {
  const void* hidden;  // (tile.rows, depth)
  const void* weight;  // (tile.columns, depth)
  const float* bias;   // (tile.columns,), or null
  int64_t depth;
  int64_t hidden_stride;
  int64_t weight_stride;
  int32_t dtype;          // of `hidden` and `weight`
  int32_t rounded;        // round the GEMM plus update to `dtype`, and again after the bias
  Update update;
  Tile tile;              // its rows are the tokens; its fp32 logits are written unless null
};

// Tokens [first, first + count), and their prepared inputs. Vectors are padded to whole groups.
struct Chunk {
  int64_t first;
  int64_t count;
  int64_t padded;            // count in whole groups
  const void* packed;        // hidden, in the layout of the GEMM
  const int32_t* target;     // -1: none
  const float* score_scale;  // Scores::score_scale
};

// An implementation of the GEMM of the logits.
struct Gemm {
  int64_t chunk_tokens;  // whole panels; they stay in L2 while the vocabulary streams past
  int64_t panel_tokens;  // whole groups that are packed together
  // Bytes of `padded` packed tokens, and of a thread's scratch memory in `block`.
  int64_t (*packed_bytes)(const Linear&, int64_t padded);
  int64_t (*scratch_bytes)(const Linear&);
  // Packs the panel that starts at the chunk's token `at`; tokens past the last are zeros.
  void (*pack)(const Linear&, const Chunk&, int64_t at, void* packed);
  // The block of rows [row, row + rows), without bias. Reads only elements of hidden and weight, no
  // bytes around them.
  void (*block)(const Linear&, const Chunk&, int64_t row, int64_t rows, void* scratch,
                float* block);
};

// Sums of each token of a chunk over each split: (splits, padded tokens). `best` is the first block
// that contains `top`.
struct Partials {
  double* total;
  double* moment;
  double* squares;
  float* top;
  float* bottom;
  int32_t* best;
};

// Facts about each token's target.
struct AtTarget {
  float* u;
  int32_t* first;  // whether no earlier row in its block is as large
};

struct LinearKernels {
  int64_t lanes;
  const Gemm* (*gemm)(int32_t dtype);
  // Folds a block into the sums at `sums`, or starts them with it; overwrites the block.
  void (*fold)(const Linear&, const Chunk&, int64_t row, int64_t rows, float* block,
               const Partials&, int64_t sums, bool extras, const AtTarget&);
  // Results of the group that starts at the chunk's token `at`.
  void (*merge)(const Linear&, const Chunk&, int64_t at, const Partials&, const AtTarget&,
                const Stats&);
};

void linear_stats(const Linear&, const Stats&, const LinearKernels&, int32_t threads);

#if defined(__x86_64__)
// GEMMs of bf16 in the matrix registers, in groups of sixteen tokens.
extern const Gemm kAmxGemm;
// Whether this machine and the compiler support them, and the system lets this process use them.
bool amx_granted();
// The same by AVX-512's dot product of pairs, for a machine that has AVX-512.
extern const Gemm kBf16Gemm;
bool has_bf16();
#endif

}  // namespace grpo
