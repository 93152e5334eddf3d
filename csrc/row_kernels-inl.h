// Statistics of a row of logits, and its gradient.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "convert-inl.h"
#include "rows.h"
#include "simd-inl.h"

namespace grpo::GRPO_ISA {

constexpr int64_t kBlock = 2048;  // a row is processed in blocks that stay in L1

GRPO_INLINE int64_t block_size(const Tile& tile, int64_t begin) {
  return tile.columns - begin < kBlock ? tile.columns - begin : kBlock;
}

// `count` <= kBlock logits in fp32, padded with -inf to whole vectors; copied to `buffer` only if
// they are not in that form already.
template <class T>
GRPO_INLINE const float* load_block(const T* logits, int64_t count, float* buffer) {
  if constexpr (std::is_same_v<T, float>) {
    if (count % kLanes == 0) return logits;
  }
  const int64_t whole = count - count % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) store(buffer + i, load(logits + i));
  if (whole < count) store(buffer + whole, load_some(logits + whole, count - whole, -INFINITY));
  return buffer;
}

// u of the logits of a block. The transform changes the padding, which is reset to -inf.
template <class T>
GRPO_INLINE const float* score_block(const T* logits, int64_t count, const Scores& scores,
                                     float* buffer) {
  const float* block = load_block(logits, count, buffer);
  if (!scores.softcapped) return block;
  for (int64_t i = 0; i < count; i += kLanes) {
    store(buffer + i, tanh(load(block + i) * scores.cap_scale));
  }
  for (int64_t i = count; i % kLanes != 0; ++i) buffer[i] = -INFINITY;
  return buffer;
}

template <class T>
GRPO_INLINE float score_one(const T* logit, const Scores& scores) {
  const Float x = load_some(logit, 1, 0.0f);
  return (scores.softcapped ? tanh(x * scores.cap_scale) : x)[0];
}

// z minus the anchor's z, at least `floor`. The difference comes first: its rounding error is
// relative to the result, not to z, which may be 1e4.
GRPO_INLINE Float relative(Float u, const Scores& scores, float anchor, float floor = kExpFloor) {
  return at_least((u - anchor) * scores.score_scale, floor);
}

// Four maxima at a time: a single one would wait for itself.
GRPO_INLINE float block_max(const float* u, int64_t count) {
  Float a = splat(-INFINITY), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    a = max(load(u + i), a);
    b = max(load(u + i + kLanes), b);
    c = max(load(u + i + 2 * kLanes), c);
    d = max(load(u + i + 3 * kLanes), d);
  }
  for (; i < count; i += kLanes) a = max(load(u + i), a);
  return max(max(max(a, b), max(c, d)));
}

GRPO_INLINE float block_min(const float* u, int64_t count) {
  float least = INFINITY;
  for (int64_t i = 0; i < count; ++i) least = u[i] < least ? u[i] : least;
  return least;
}

// One sum for each lane.
struct SoftmaxSums {
  Doubles total{}, moment{}, squares{};
};

// A few terms, of d <= 0. Terms of the maximum, 1 each, are counted separately: added to a 1, the
// others would lose the digits that make up log p as p -> 1. They stay in registers only if no
// function is called.
struct Terms {
  Float ones{}, total{}, moment{}, squares{};

  template <bool kSquares>
  GRPO_INLINE_MEMBER void add(Float d) {
    const Ints top = d == 0.0f;
    const Float below = exp(d, top | (d <= kExpFloor));
    ones += top ? splat(1.0f) : Float{};
    total += below;
    moment += below * d;
    if (kSquares) squares += below * below;
  }

  template <bool kSquares>
  GRPO_INLINE_MEMBER void add_to(SoftmaxSums& all) const {
    all.total += widen(total) + widen(ones);
    all.moment += widen(moment);
    if (kSquares) all.squares += widen(squares) + widen(ones);
  }
};

// A few terms at a time are summed in fp32, and these sums in fp64, so that the error does not grow
// with the vocabulary.
struct RowSums : SoftmaxSums {
  float anchor = -FLT_MAX;

  // Prefetches `next`, the row's next block; past the row's end this has no effect.
  template <class T>
  void add(const float* u, int64_t count, const Scores& scores, const T* next) {
    constexpr int64_t kGroup = 16 * kLanes;
    for (int64_t i = 0; i < count;) {
      const int64_t end = count - i < kGroup ? count : i + kGroup;
      Terms terms;
      for (; i < end; i += kLanes) {
        __builtin_prefetch(next + i);
        terms.add<true>(relative(load(u + i), scores, anchor));
      }
      terms.add_to<true>(*this);
    }
  }

  void move_anchor(float to, const Scores& scores) {
    const double shift = scores.score_scale * (double(anchor) - to);
    const double scale = std::exp(shift);
    moment = (moment + total * shift) * scale;
    total *= scale;
    squares *= scale * scale;
    anchor = to;
  }
};

// The results of a whole row.
struct Totals {
  double total, moment, squares;  // relative to top
  float top, bottom;
  float at_target;  // u
  bool is_top1;
};

GRPO_INLINE void finish(const Stats& out, int64_t row, float score_scale, const Totals& totals) {
  const double log_sum = std::log(totals.total);
  const double entropy = log_sum - totals.moment / totals.total;
  out.logp[row] = float(score_scale * (double(totals.at_target) - totals.top) - log_sum);
  out.lse[row] = double(score_scale) * totals.top + log_sum;
  out.entropy[row] = float(entropy < 0 ? 0 : entropy);
  if (!out.is_top1) return;
  const double concentration = totals.squares / (totals.total * totals.total);
  const bool lost = totals.total != totals.total;  // a logit is NaN or infinite
  out.is_top1[row] = totals.is_top1;
  out.sum_sq_probs[row] = float(concentration > 1 ? 1 : concentration);
  out.max_logit[row] = lost ? NAN : score_scale * totals.top;
  out.min_logit[row] = lost ? NAN : score_scale * totals.bottom;
}

template <class T>
void stats_row(const Tile& tile, const Stats& out, int64_t row) {
  const T* logits = static_cast<const T*>(tile.logits) + row * tile.row_stride;
  const int64_t target = tile.target[row];
  const Scores scores(tile, row);
  float buffer[kBlock];
  RowSums sums;
  float top = -INFINITY, bottom = INFINITY;
  int64_t argmax = 0;
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    const int64_t count = block_size(tile, begin);
    const float* u = score_block(logits + begin, count, scores, buffer);
    const float block_top = block_max(u, count);
    if (block_top > top) {
      top = block_top;
      sums.move_anchor(top, scores);
      for (argmax = begin; u[argmax - begin] != top;) ++argmax;
    }
    if (out.min_logit) bottom = std::fmin(bottom, block_min(u, count));
    sums.add(u, count, scores, logits + begin + kBlock);
  }
  finish(out, row, scores.score_scale,
         {sum(sums.total), sum(sums.moment), sum(sums.squares), top, bottom,
          score_one(logits + target, scores), argmax == target});
}

// d logit of the target. 1 - p is computed by expm1, which does not cancel as p -> 1.
GRPO_INLINE float target_gradient(const Gradient& grad, int64_t row, float dentropy, float u,
                                  const Scores& scores) {
  const double logp = grad.logp[row];
  const double p = std::exp(logp);
  const double from_entropy = p == 0 ? 0 : dentropy * p * (logp + grad.entropy[row]);
  const double dz = -grad.dlogp[row] * std::expm1(logp) - from_entropy;
  return float(dz * scores.dlogit * (scores.softcapped ? (1.0 - u) * (1.0 + u) : 1.0));
}

// A probability p_v < 2^-64 (1 - p) gets gradient 0. All of them together are less than the rounding
// of the row's gradient, and as factors in a GEMM they would give subnormal products and sums, each
// of which costs a CPU as much as a hundred others.
constexpr double kNegligible = -64 * 0.6931471805599453;

// Off the target dlogit = -p (dlogp + dentropy (log p + H)) dz/dlogit, where log p = d + rest: d is
// relative to an fp32 anchor near lse, and the rest is the remainder.
struct RowGradient {
  float anchor;
  float factor;    // of exp(d)
  float dentropy;  // of d
  float constant;  // added to d * dentropy
  float floor;     // of d: at or below it the gradient is 0

  RowGradient(const Gradient& grad, int64_t row, const Scores& scores) {
    anchor = float(grad.lse[row] / scores.score_scale);
    const double rest = double(scores.score_scale) * anchor - grad.lse[row];
    factor = float(-scores.dlogit * std::exp(rest));
    dentropy = grad.dentropy ? grad.dentropy[row] : 0.0f;
    constant = float(grad.dlogp[row] + double(dentropy) * (grad.entropy[row] + rest));
    const double others = std::log(-std::expm1(double(grad.logp[row])));
    floor = std::fmax(kExpFloor, float(others + kNegligible));
  }
};

template <bool kCapped, class T, class Out>
GRPO_INLINE void dlogits_block(const float* u, int64_t count, const Scores& scores,
                               const RowGradient& row, Out* out, const T* next) {
  for (int64_t i = 0; i < count; i += kLanes) {
    __builtin_prefetch(next + i);
    const Float v = load(u + i);
    const Float d = relative(v, scores, row.anchor, row.floor);
    Float result = (exp(d, d <= row.floor) * row.factor) * (d * row.dentropy + row.constant);
    if (kCapped) result *= (1.0f - v) * (1.0f + v);
    store_lanes(out + i, result, count - i);
  }
}

// Runs forward: the write position never passes the read position, so a 16-bit row can overwrite
// the fp32 row that it is computed from.
template <class T, class Out>
void dlogits_row(const Tile& tile, const Gradient& grad, int64_t row) {
  const T* logits = static_cast<const T*>(tile.logits) + row * tile.row_stride;
  Out* out = static_cast<Out*>(grad.out) + row * grad.out_stride;
  if (grad.dlogp[row] == 0 && (!grad.dentropy || grad.dentropy[row] == 0)) {
    std::memset(static_cast<void*>(out), 0, tile.columns * sizeof(Out));
    return;
  }
  const Scores scores(tile, row);
  const RowGradient gradient(grad, row, scores);
  const int64_t target = tile.target[row];
  const bool here = target >= 0 && target < tile.columns;
  const float u = here ? score_one(logits + target, scores) : 0;
  const float at_target = target_gradient(grad, row, gradient.dentropy, u, scores);
  float buffer[kBlock];
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    const int64_t count = block_size(tile, begin);
    const T* next = logits + begin + kBlock;
    const float* u = score_block(logits + begin, count, scores, buffer);
    if (scores.softcapped) {
      dlogits_block<true>(u, count, scores, gradient, out + begin, next);
    } else {
      dlogits_block<false>(u, count, scores, gradient, out + begin, next);
    }
  }
  if (here) store_some(out + target, splat(at_target), 1);
}

void stats(const Tile& tile, const Stats& out, int64_t row) {
  with_dtype(tile.dtype, [&](auto element) { stats_row<decltype(element)>(tile, out, row); });
}

void dlogits(const Tile& tile, const Gradient& grad, int64_t row) {
  with_dtype(grad.out_dtype, [&](auto result) {
    using Out = decltype(result);
    if (tile.dtype == kFloat32) return dlogits_row<float, Out>(tile, grad, row);
    dlogits_row<Out, Out>(tile, grad, row);
  });
}

}  // namespace grpo::GRPO_ISA
