// Folds blocks of logits into the sums of their tokens, which are side by side in a vector.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>

#include "gemm_fp32-inl.h"
#include "linear.h"
#include "row_kernels-inl.h"

namespace grpo::GRPO_ISA {

constexpr int64_t kTerms = 32;  // summed in fp32; these sums are added in fp64

GRPO_INLINE Ints load_ints(const int32_t* source) {
  Ints x;
  std::memcpy(&x, source, sizeof(x));
  return x;
}

GRPO_INLINE Doubles load_doubles(const double* source) {
  Doubles x;
  std::memcpy(&x, source, sizeof(x));
  return x;
}

template <class Vector>
GRPO_INLINE void put(void* target, Vector x) {
  std::memcpy(target, &x, sizeof(x));
}

// The rounded GEMM plus bias, rounded again, as a tile in the dtype would hold it.
template <Float (*rounded)(Float)>
GRPO_INLINE void round_logits(const float* bias, int64_t rows, float* u) {
  for (int64_t row = 0; row < rows; ++row, u += kLanes) {
    Float x = rounded(load(u));
    if (bias) x = rounded(x + bias[row]);
    store(u, x);
  }
}

void add_bias(const float* bias, int64_t rows, float* u) {
  for (int64_t row = 0; row < rows; ++row, u += kLanes) store(u, load(u) + bias[row]);
}

// The update of the group that starts at `token`, four rows at a time: a single sum would wait for
// itself. Rows past the last repeat it and are not read.
void add_update(const Update& update, int64_t token, int64_t row, int64_t rows, float* u) {
  constexpr int64_t kAtATime = 4;
  static_assert(kBlockRows % kAtATime == 0);
  for (int64_t first = 0; first < update.rank; first += kRankStep) {
    Float lora_u[kRankStep];
    for (int64_t k = 0; k < kRankStep; ++k) {
      lora_u[k] = load(update.lora_u + (first + k) * update.lora_u_stride + token);
    }
    for (int64_t i = 0; i < rows; i += kAtATime) {
      Float sums[kAtATime] = {};
      const float* lora_b[kAtATime];
      for (int64_t j = 0; j < kAtATime; ++j) {
        const int64_t own = i + j < rows ? i + j : rows - 1;
        lora_b[j] = update.lora_b + (row + own) * update.rank + first;
      }
      for (int64_t k = 0; k < kRankStep; ++k) {
        for (int64_t j = 0; j < kAtATime; ++j) sums[j] += splat(lora_b[j][k]) * lora_u[k];
      }
      for (int64_t j = 0; j < kAtATime; ++j) {
        float* to = u + (i + j) * kLanes;
        store(to, load(to) + sums[j]);
      }
    }
  }
}

void complete_logits(const Linear& linear, int64_t token, int64_t row, int64_t rows, float* u) {
  if (linear.update.lora_u) add_update(linear.update, token, row, rows, u);
  const float* bias = linear.bias ? linear.bias + row : nullptr;
  if (linear.rounded && linear.dtype == kBFloat16) return round_logits<to_bfloat16>(bias, rows, u);
  if (linear.rounded && linear.dtype == kFloat16) return round_logits<to_float16>(bias, rows, u);
  if (bias) add_bias(bias, rows, u);
}

// One group's rows of the tile of logits.
void store_logits(const Tile& tile, int64_t token, int64_t tokens, int64_t row, int64_t rows,
                  const float* u) {
  for (int64_t lane = 0; lane < tokens; ++lane) {
    float* target =
        static_cast<float*>(tile.logits) + (token + lane) * tile.row_stride + row;
    for (int64_t i = 0; i < rows; ++i) target[i] = u[i * kLanes + lane];
  }
}

// The sums of one group.
struct GroupSums : SoftmaxSums {
  Float top = splat(-INFINITY), bottom = splat(INFINITY);
  Ints best{};

  GroupSums() = default;

  GroupSums(const Partials& from, int64_t at)
      : SoftmaxSums{load_doubles(from.total + at), load_doubles(from.moment + at),
                    load_doubles(from.squares + at)},
        top(load(from.top + at)),
        bottom(load(from.bottom + at)),
        best(load_ints(from.best + at)) {}

  void save(const Partials& to, int64_t at) const {
    put(to.total + at, total);
    put(to.moment + at, moment);
    put(to.squares + at, squares);
    put(to.top + at, top);
    put(to.bottom + at, bottom);
    put(to.best + at, best);
  }

  Float anchor() const { return at_least(top, -FLT_MAX); }

  // Makes `to` >= top the new top. Lanes where it equals top keep their bits.
  void raise(Float to, Float score_scale) {
    const Doubles from_anchor = widen(anchor());
    top = to;
    const Doubles shift = widen(score_scale) * (from_anchor - widen(anchor()));
    const Doubles scale = exp(shift);
    const Doubles bounded = shift < -708.0 ? Doubles{} - 708.0 : shift;  // avoids 0 * inf
    moment = (moment + total * bounded) * scale;
    total *= scale;
    squares *= scale * scale;
  }

  template <bool kExtras>
  void add(const float* u, int64_t rows, Float score_scale) {
    const Float from = anchor();
    for (int64_t row = 0; row < rows;) {
      const int64_t end = rows - row < kTerms ? rows : row + kTerms;
      Terms terms;
      for (; row < end; ++row) {
        terms.add<kExtras>(at_least((load(u + row * kLanes) - from) * score_scale, kExpFloor));
      }
      terms.add_to<kExtras>(*this);
    }
  }
};

GRPO_INLINE Float rows_max(const float* u, int64_t rows) {
  Float a = splat(-INFINITY), b = a, c = a, d = a;
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4, u += 4 * kLanes) {
    a = max(load(u), a);
    b = max(load(u + kLanes), b);
    c = max(load(u + 2 * kLanes), c);
    d = max(load(u + 3 * kLanes), d);
  }
  for (; row < rows; ++row, u += kLanes) a = max(load(u), a);
  return max(max(a, b), max(c, d));
}

GRPO_INLINE Float rows_min(const float* u, int64_t rows) {
  Float least = splat(INFINITY);
  for (int64_t row = 0; row < rows; ++row, u += kLanes) {
    const Float x = load(u);
    least = x < least ? x : least;
  }
  return least;
}

// Targets among the rows [row, row + rows): rare, so one at a time.
void find_targets(const Chunk& chunk, int64_t at, int64_t row, int64_t rows, const float* u,
                  const AtTarget& out) {
  const Ints inside = load_ints(chunk.target + at) - int32_t(row);
  if (!any((Bits)(inside >= 0) & (Bits)(inside < int32_t(rows)))) return;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t target = inside[lane];
    if (target < 0 || target >= rows) continue;
    const float its = u[target * kLanes + lane];
    bool first = true;
    for (int64_t i = 0; i < target; ++i) first = first && u[i * kLanes + lane] < its;
    out.u[at + lane] = its;
    out.first[at + lane] = first;
  }
}

template <bool kExtras>
void fold_group(const Chunk& chunk, int64_t at, int64_t row, int64_t rows, const float* u,
                GroupSums& sums) {
  const Float score_scale = load(chunk.score_scale + at);
  const Float top = max(rows_max(u, rows), sums.top);
  const Ints higher = top > sums.top;
  if (any((Bits)higher)) {
    sums.raise(top, score_scale);
    sums.best = higher ? Ints{} + int32_t(row / kBlockRows) : sums.best;
  }
  if (kExtras) {
    const Float least = rows_min(u, rows);
    sums.bottom = least < sums.bottom ? least : sums.bottom;
  }
  sums.add<kExtras>(u, rows, score_scale);
}

void fold(const Linear& linear, const Chunk& chunk, int64_t row, int64_t rows, float* block,
          const Partials& partials, int64_t begin, bool extras, const AtTarget& at_target) {
  const Scores scores(linear.tile, chunk.first);
  for (int64_t at = 0; at < chunk.count; at += kLanes) {
    float* u = block + at * kBlockRows;
    complete_logits(linear, chunk.first + at, row, rows, u);
    if (linear.tile.logits) {
      const int64_t tokens = chunk.count - at < kLanes ? chunk.count - at : kLanes;
      store_logits(linear.tile, chunk.first + at, tokens, row, rows, u);
    }
    if (scores.softcapped) {
      for (int64_t i = 0; i < rows * kLanes; i += kLanes) {
        store(u + i, tanh(load(u + i) * scores.cap_scale));
      }
    }
    find_targets(chunk, at, row, rows, u, at_target);
    GroupSums sums = row % kSplitRows ? GroupSums(partials, begin + at) : GroupSums();
    if (extras) {
      fold_group<true>(chunk, at, row, rows, u, sums);
    } else {
      fold_group<false>(chunk, at, row, rows, u, sums);
    }
    sums.save(partials, begin + at);
  }
}

void merge(const Linear& linear, const Chunk& chunk, int64_t at, const Partials& partials,
           const AtTarget& at_target, const Stats& out) {
  const Float score_scale = load(chunk.score_scale + at);
  GroupSums all;
  for (int64_t i = at, row = 0; row < linear.tile.columns; row += kSplitRows, i += chunk.padded) {
    GroupSums one(partials, i);
    const Float top = max(one.top, all.top);
    all.best = top > all.top ? one.best : all.best;
    all.bottom = one.bottom < all.bottom ? one.bottom : all.bottom;
    all.raise(top, score_scale);
    one.raise(top, score_scale);
    all.total += one.total;
    all.moment += one.moment;
    all.squares += one.squares;
  }
  const int64_t tokens = chunk.count - at < kLanes ? chunk.count - at : kLanes;
  for (int64_t lane = 0; lane < tokens; ++lane) {
    const float u = at_target.u[at + lane];
    const bool is_top1 = u == all.top[lane] && at_target.first[at + lane] &&
                         chunk.target[at + lane] / kBlockRows == all.best[lane];
    const Totals totals = {all.total[lane], all.moment[lane], all.squares[lane], all.top[lane],
                           all.bottom[lane], u, is_top1};
    finish(out, chunk.first + at + lane, score_scale[lane], totals);
  }
}

const Gemm* gemm(int32_t dtype) {
  return with_dtype(dtype, [](auto element) { return &kGemm<decltype(element)>; });
}

constexpr LinearKernels kLinear = {kLanes, gemm, fold, merge};

}  // namespace grpo::GRPO_ISA
