// The divergence of a student's row from a teacher's, and the gradient of the student's logits. The
// term of each id, and logp_grad, its derivative with respect to log s, mirror
// grpo_kernels/backends/divergence.py.
#pragma once

#include <cstring>

#include "row_kernels-inl.h"

namespace grpo::GRPO_ISA {

constexpr float kLeastLogp = -1e4f;  // LEAST_LOGP of grpo_kernels/backends/base.py

GRPO_INLINE Float positive(Float x) { return x > 0.0f ? x : Float{}; }

// e^x - 1 for x <= 0, to about 1 ulp of the result.
GRPO_INLINE Float expm1(Float x) {
  const Exponential e = exponential(at_least(x, kExpFloor));
  return e.rest * e.power + (e.power - 1.0f);
}

// log(1 + y) for y in (-1, 0], to about 2 ulp. 1 + y = 2^k (1 + f) with 1 + f near 1, and
// log(1 + f) = 2 artanh(f / (2 + f)), by the first terms of its series.
GRPO_INLINE Float log1p(Float y) {
  constexpr uint32_t kRootOfHalf = 0x3f3504f3u;
  const Bits bits = (Bits)(y + 1.0f) - kRootOfHalf;
  const Ints exponent = (Ints)bits >> 23;
  const Float rest = (Float)((bits & 0x007fffffu) + kRootOfHalf) - 1.0f;
  const Float f = exponent == 0 ? y : rest;
  const Float z = f / (f + 2.0f), zz = z * z;
  Float p = zz * (2.0f / 9) + 2.0f / 7;
  p = p * zz + 2.0f / 5;
  p = p * zz + 2.0f / 3;
  const Float k = __builtin_convertvector(exponent, Float);
  return k * 0.693359375f + ((z * zz) * p + (z + z) + k * -2.12194440e-4f);
}

// log p of a row's ids: z - lse, through an fp32 anchor near lse.
struct LogProbs {
  Scores scores;
  float anchor, rest;

  LogProbs(const Tile& tile, int64_t row, double lse) : scores(tile, row) {
    anchor = float(lse / scores.score_scale);
    rest = float(double(scores.score_scale) * anchor - lse);
  }

  Float operator()(Float u) const {
    return at_least((u - anchor) * scores.score_scale + rest, kLeastLogp);
  }
};

GRPO_INLINE const float* scores_of(const Tile& tile, int64_t row, int64_t begin, int64_t count,
                                   const Scores& scores, float* buffer) {
  return with_dtype(tile.dtype, [&](auto element) {
    const auto* logits = static_cast<const decltype(element)*>(tile.logits);
    return score_block(logits + row * tile.row_stride + begin, count, scores, buffer);
  });
}

struct OfIds {
  Float s, each, logp_grad;
};

template <int32_t kKind>
GRPO_INLINE OfIds of_ids(Float log_s, Float log_t, float beta) {
  const Float s = exp(log_s, log_s <= kExpFloor), t = exp(log_t, log_t <= kExpFloor);
  const Float delta = log_t - log_s;
  if constexpr (kKind == kForwardKl) return {s, t * delta, -t};
  if constexpr (kKind == kReverseKl) {
    const Float each = -s * delta;
    return {s, each, each};
  }
  // log(s / m) and log(t / m), from the larger of the two
  const Float size = positive(delta) + positive(-delta);
  const Float weight = delta > 0.0f ? splat(1.0f - beta) : splat(beta);
  const Float below = -log1p(weight * expm1(-size));
  const Float logp_grad = (1.0f - beta) * s * (below - positive(delta));
  return {s, logp_grad + beta * t * (below - positive(-delta)), logp_grad};
}

// Calls `take(at, count, log_s, log_t, u)` with a vector of ids at a time; u is the student's.
template <class Take>
GRPO_INLINE void walk(const Tile& tile, const Divergence& of, int64_t row, const Take& take) {
  const LogProbs student(tile, row, of.lse[row]);
  const LogProbs teacher(of.teacher, row, of.teacher_lse[row]);
  float buffer[kBlock], teacher_buffer[kBlock];
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    const int64_t count = block_size(tile, begin);
    const float* u = scores_of(tile, row, begin, count, student.scores, buffer);
    const float* v = scores_of(of.teacher, row, begin, count, teacher.scores, teacher_buffer);
    for (int64_t i = 0; i < count; i += kLanes) {
      take(begin + i, count - i, student(load(u + i)), teacher(load(v + i)), load(u + i));
    }
  }
}

template <int32_t kKind>
void divergence_sums(const Tile& tile, const Divergence& of, int64_t row) {
  constexpr int64_t kGroup = 16;  // vectors that are summed in fp32
  const float beta = float(of.beta);
  Float each{}, logp_grad{};
  Doubles all_each{}, all_logp_grad{};
  int64_t vectors = 0;
  walk(tile, of, row, [&](int64_t, int64_t, Float log_s, Float log_t, Float) {
    const OfIds ids = of_ids<kKind>(log_s, log_t, beta);
    each += ids.each;
    logp_grad += ids.logp_grad;
    if (++vectors % kGroup == 0) {
      all_each += widen(each);
      all_logp_grad += widen(logp_grad);
      each = logp_grad = Float{};
    }
  });
  of.sums[row] = sum(all_each + widen(each));
  of.sums[tile.rows + row] = sum(all_logp_grad + widen(logp_grad));
}

template <int32_t kKind, class Out>
void divergence_gradient(const Tile& tile, const Divergence& of, int64_t row) {
  Out* out = static_cast<Out*>(of.out) + row * of.out_stride;
  if (of.coefficient[row] == 0) {
    std::memset(static_cast<void*>(out), 0, tile.columns * sizeof(Out));
    return;
  }
  const Scores scores(tile, row);
  const float beta = float(of.beta), total = float(of.logp_grad_sum[row]);
  const float factor = of.coefficient[row] * scores.dlogit;
  walk(tile, of, row, [&](int64_t at, int64_t count, Float log_s, Float log_t, Float u) {
    const OfIds ids = of_ids<kKind>(log_s, log_t, beta);
    Float result = (ids.logp_grad - ids.s * total) * factor;
    if (scores.softcapped) result *= (1.0f - u) * (1.0f + u);
    store_lanes(out + at, result, count);
  });
}

template <int32_t kKind>
void divergence_of_kind(const Tile& tile, const Divergence& of, int64_t row) {
  if (of.sums) return divergence_sums<kKind>(tile, of, row);
  with_dtype(of.out_dtype, [&](auto result) {
    divergence_gradient<kKind, decltype(result)>(tile, of, row);
  });
}

void divergence(const Tile& tile, const Divergence& of, int64_t row) {
  if (of.kind == kForwardKl) return divergence_of_kind<kForwardKl>(tile, of, row);
  if (of.kind == kReverseKl) return divergence_of_kind<kReverseKl>(tile, of, row);
  divergence_of_kind<kJsd>(tile, of, row);
}

}  // namespace grpo::GRPO_ISA
