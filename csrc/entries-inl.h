// The pass over a row of logits that chooses the entries of its gradient, and the sums of sparse
// products. The method: grpo_kernels/backends/entries.py.
#pragma once

#include <cmath>
#include <cstring>

#include "entries.h"
#include "row_kernels-inl.h"

namespace grpo::GRPO_ISA {

// A block of strands is one of the blocks in which a row is processed.
static_assert(kStrands == kBlock);

constexpr uint32_t kGolden = 0x9E3779B9u;

// The end of MurmurHash3.
GRPO_INLINE Bits mixed(Bits x) {
  x = (x ^ x >> 16) * 0x85EBCA6Bu;
  x = (x ^ x >> 13) * 0xC2B2AE35u;
  return x ^ x >> 16;
}

// A row's entries except the target's, negated, each times a factor; with a gradient of the
// entropy, log p = d + rest is a factor, too. d is as in RowGradient.
struct Others {
  Scores scores;
  float anchor;
  float factor;  // of exp(d)
  float dentropy = 0, constant = 1;

  Others(const Tile& tile, const GradStats& grad_stats, int64_t row, double lse, double scale)
      : scores(tile, row) {
    anchor = float(lse / scores.score_scale);
    const double rest = double(scores.score_scale) * anchor - lse;
    factor = float(scale * scores.dlogit * std::exp(rest));
    if (!grad_stats.entropy) return;
    dentropy = grad_stats.dentropy[row];
    constant = float(grad_stats.dlogp[row] + double(dentropy) * (grad_stats.entropy[row] + rest));
  }

  template <bool kEntropy>
  Float of(Float u) const {
    const Float d = relative(u, scores, anchor);
    Float result = exp(d) * factor;
    if (kEntropy) result *= d * dentropy + constant;
    if (!scores.softcapped) return result;
    const Float inside = at_least(u, -1.0f);  // u = -inf, which no tanh can be, would give 0 * inf
    return result * ((1.0f - inside) * (1.0f + inside));
  }
};

// The entries of a row's columns starting at `begin`, in whole vectors: 0 at the target and past
// the end. Prefetches the block `next`. Returns how many there are.
template <class T>
int64_t block_others(const Tile& tile, int64_t row, int64_t begin, int64_t next,
                     const Others& others, float* out) {
  const T* logits = static_cast<const T*>(tile.logits) + row * tile.row_stride;
  const int64_t count = block_size(tile, begin), target = tile.target[row] - begin;
  const float* u = score_block(logits + begin, count, others.scores, out);
  const bool entropy = others.dentropy != 0;
  int64_t i = 0;
  for (; i < count; i += kLanes) {
    __builtin_prefetch(logits + next + i);
    const Float v = load(u + i);
    store(out + i, entropy ? others.of<true>(v) : others.of<false>(v) * others.constant);
  }
  if (target >= 0 && target < count) out[target] = 0;
  return i;
}

int64_t block_others(const Tile& tile, int64_t row, int64_t begin, int64_t next,
                     const Others& others, float* out) {
  return with_dtype(tile.dtype, [&](auto element) {
    return block_others<decltype(element)>(tile, row, begin, next, others, out);
  });
}

GRPO_INLINE Float size_of(Float x) { return (Float)((Bits)x & 0x7fffffffu); }

// The derivative of u at the row's target, except for the factor Scores::cap_scale.
double target_curve(const Tile& tile, int64_t row) {
  if (tile.softcap == 0) return 1;
  return with_dtype(tile.dtype, [&](auto element) {
    const auto* logits = static_cast<const decltype(element)*>(tile.logits);
    const int64_t at = row * tile.row_stride + tile.target[row];
    const double u = score_one(logits + at, Scores(tile, row));
    return (1 - u) * (1 + u);
  });
}

// The state of a row while its entries are chosen. Sizes are in units of its cut.
class Choice {
 public:
  Choice(const Extraction& extraction, int64_t row, float cut)
      : out_(extraction.out), cut_(cut), ids_(out_.ids + row * out_.slots),
        values_(out_.values + row * out_.slots) {
    const uint32_t key = uint32_t(extraction.keys[row]);
    for (int64_t i = 0; i < kStrands; i += kLanes) {
      Bits strand;
      for (int64_t lane = 0; lane < kLanes; ++lane) strand[lane] = uint32_t(i + lane);
      const Ints draw = (Ints)(mixed(strand * kGolden + key) >> 8);
      store(left_ + i, (__builtin_convertvector(draw, Float) + 0.5f) * 0x1p-24f);
    }
  }

  void list(int32_t column, float value) {
    if (count < out_.slots) {
      ids_[count] = column;
      values_[count] = value;
    }
    ++count;
  }

  // `others` are overwritten.
  void add_block(float* others, int64_t begin, int64_t padded) {
    constexpr int64_t kGroup = 16 * kLanes;
    for (int64_t i = 0; i < padded;) {
      const int64_t first = i, stop = padded - i < kGroup ? padded : i + kGroup;
      Float sum{}, sum_of_squares{}, most{};
      for (; i < stop; i += kLanes) {
        const Float other = load(others + i), size = size_of(other);
        const Ints large = size > 1.0f;
        const Float share = large ? Float{} : size;
        sum += share;
        sum_of_squares += share * share;
        const Float left = load(left_ + i) - share;
        const Ints drawn = left <= 0.0f;
        store(left_ + i, drawn ? left + 1.0f : left);
        const Float hit = large | drawn ? other : Float{};
        most = max(size_of(hit), most);
        store(others + i, hit);
      }
      tail += total(sum);
      squares += total(sum_of_squares);
      if (any((Bits)(most > 0.0f))) list_hits(others, first, i, int32_t(begin));
    }
  }

  int64_t count = 0, num_large = 0;
  double tail = 0, squares = 0;  // of sizes up to the cut
  double large_squares = 0;
  double drawn_excess = 0;  // the change of both by drawing

 private:
  static double total(Float x) { return sum(widen(x)); }

  // Draws are rare: most vectors have none.
  void list_hits(const float* hits, int64_t first, int64_t stop, int32_t begin) {
    for (int64_t i = first; i < stop; i += kLanes) {
      if (!any((Bits)(size_of(load(hits + i)) > 0.0f))) continue;
      for (int64_t lane = i; lane < i + kLanes; ++lane) {
        const float size = std::fabs(hits[lane]);
        if (size == 0) continue;
        list(begin + int32_t(lane), -std::copysign(size > 1 ? size * cut_ : cut_, hits[lane]));
        if (size > 1) {
          ++num_large;
          large_squares += double(size) * size;
        } else {
          drawn_excess += 1 - 2 * double(size);
        }
      }
    }
  }

  const Entries& out_;
  const float cut_;
  int32_t* ids_;
  float* values_;
  float left_[kStrands];  // of each strand, until its next draw
};

// With respect to the target's score.
double gradient_at_target(const Extraction& extraction, int64_t row) {
  const double logp = extraction.logp[row], others = -std::expm1(logp), p = std::exp(logp);
  const GradStats& grad_stats = extraction.grad_stats;
  if (!grad_stats.entropy) return others;
  const double bonus = p == 0 ? 0 : grad_stats.dentropy[row] * p * (logp + grad_stats.entropy[row]);
  return grad_stats.dlogp[row] * others - bonus;
}

void extract(const Tile& tile, const Extraction& extraction, int64_t row) {
  const Entries& out = extraction.out;
  const bool without_gradient = extraction.cuts[row] >= kAnyError;
  extraction.error[row] = extraction.error_l1[row] = extraction.expected_error[row] = 0;
  if (without_gradient || !std::isfinite(extraction.lse[row])) {
    out.used[row] = without_gradient ? 0 : kWhole;
    extraction.norm[row] = 0;
    return;
  }
  const float cut = std::fmax(extraction.cuts[row], 1e-30f);
  const Others others(tile, extraction.grad_stats, row, extraction.lse[row], 1 / double(cut));
  Choice choice(extraction, row, cut);
  const int64_t target = tile.target[row];
  double at_target = 0;
  const bool here = target >= 0 && target < tile.columns;  // otherwise on another rank
  if (here) {
    const double curve = target_curve(tile, row);
    at_target = gradient_at_target(extraction, row) * others.scores.dlogit * curve;
    choice.list(int32_t(target), float(at_target));
  }
  float buffer[kBlock];
  for (int64_t begin = 0; begin < tile.columns; begin += kBlock) {
    const int64_t padded = block_others(tile, row, begin, begin + kBlock, others, buffer);
    choice.add_block(buffer, begin, padded);
  }
  const double tail = choice.tail, squares = choice.squares, excess = choice.drawn_excess;
  const double count = here + choice.num_large + tail + 4 * std::sqrt(tail);  // expected at most
  const bool fits = count <= out.slots && choice.count <= out.slots;
  out.used[row] = fits ? int32_t(choice.count) : kWhole;
  const double norm = (squares + fits * choice.large_squares) * cut * cut;
  extraction.norm[row] = float(std::sqrt(at_target * at_target + norm));
  if (!fits) return;
  extraction.error[row] = float(cut * std::sqrt(std::fmax(squares + excess, 0)));
  extraction.error_l1[row] = float(cut * std::fmax(tail + excess, 0));
  extraction.expected_error[row] = float(cut * std::sqrt(std::fmax(tail - squares, 0)));
}

void tail_sums(const Tile& tile, const TailSums& of, int64_t row) {
  float* sums = of.sums + row * 2 * of.num_cuts;
  std::memset(sums, 0, 2 * of.num_cuts * sizeof(float));
  if (!std::isfinite(of.lse[row])) return;
  const Others others(tile, of.grad_stats, row, of.lse[row], of.weight[row]);
  float buffer[kBlock];
  for (int64_t i = 0; i < of.sampled; ++i) {
    const int64_t begin = (row + i * of.blocks / of.sampled) % of.blocks * kBlock;
    const int64_t padded = block_others(tile, row, begin, begin, others, buffer);
    for (int64_t k = 0; k < of.num_cuts; ++k) {
      Float tail{}, squares{};
      for (int64_t j = 0; j < padded; j += kLanes) {
        const Float size = size_of(load(buffer + j));
        const Float share = size > of.cuts[k] ? Float{} : size;
        tail += share;
        squares += share * share;
      }
      sums[k] += float(sum(widen(tail)));
      sums[of.num_cuts + k] += float(sum(widen(squares)));
    }
  }
}

template <class T>
GRPO_INLINE Float load_lanes(const T* source, int64_t count) {
  return count >= kLanes ? load(source) : load_some(source, count, 0.0f);
}

// sums += the kCount summands; prefetches the same number at `next`.
template <int64_t kCount, class T>
GRPO_INLINE void add_summands(const Product& product, const Summand* summands, bool next,
                              float* sums) {
  const T* rows[kCount];
  const T* later[kCount];
  for (int64_t k = 0; k < kCount; ++k) {
    const T* source = static_cast<const T*>(product.source);
    rows[k] = source + summands[k].row * product.source_stride;
    later[k] = next ? source + summands[kCount + k].row * product.source_stride : rows[k];
  }
  for (int64_t i = 0; i < product.width; i += kLanes) {
    Float total = load(sums + i);
    for (int64_t k = 0; k < kCount; ++k) {
      __builtin_prefetch(later[k] + i);
      total += load_lanes(rows[k] + i, product.width - i) * summands[k].weight;
    }
    store(sums + i, total);
  }
}

template <class T, class Out>
void combine_row(const Product& product, const Summand* summands, int64_t count, int64_t row,
                 float* sums) {
  constexpr int64_t kAtATime = 4;  // rows that are read in parallel
  const int64_t width = product.width;
  for (int64_t i = 0; i < width; i += kLanes) store(sums + i, Float{});
  int64_t k = 0;
  for (; k + kAtATime <= count; k += kAtATime) {
    add_summands<kAtATime, T>(product, summands + k, k + 2 * kAtATime <= count, sums);
  }
  for (; k < count; ++k) add_summands<1, T>(product, summands + k, k + 1 < count, sums);
  Out* out = static_cast<Out*>(product.out) + row * product.out_stride;
  for (int64_t i = 0; i < width; i += kLanes) {
    Float total = load(sums + i);
    if (product.add) total += load_lanes(out + i, width - i);
    store_lanes(out + i, total, width - i);
  }
}

void combine(const Product& product, const Summand* summands, int64_t count, int64_t row,
             float* sums) {
  with_dtype(product.source_dtype, [&](auto element) {
    using T = decltype(element);
    if (product.out_dtype != kFloat32) {
      return combine_row<T, T>(product, summands, count, row, sums);
    }
    combine_row<T, float>(product, summands, count, row, sums);
  });
}

constexpr EntryKernels kEntries = {extract, tail_sums, combine};

}  // namespace grpo::GRPO_ISA
