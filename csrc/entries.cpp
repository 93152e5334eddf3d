// The choice of a row's entries from its candidates.
#include "entries.h"

#include <algorithm>
#include <cmath>

namespace grpo {
namespace {

constexpr int64_t kSteps = 48;  // cuts to choose from: each sqrt(2) times the one before
constexpr int32_t kWhole = -1;
constexpr double kTiny = 1e-300;
constexpr double kAnyError = 1e30;  // or more: the row has no gradient

double uniform(int32_t key, int32_t column) {
  const uint32_t hashed = mixed(uint32_t(key) + uint32_t(column) * kGolden);
  return ((hashed >> 8) + 0.5) * 0x1p-24;
}

// The cuts to choose from, and what each would mean for what has been read of a row.
class Cuts {
 public:
  Cuts(const Found& found, double first) : first_(first) {
    sums_[0] = found.sum;
    squares_[0] = found.squares;
    for (const Candidate* one = found.begin; one < found.end; ++one) {
      if (found.summed(*one)) continue;
      const double size = one->size;
      const int64_t step = step_of(size / first);
      sums_[step] += size;
      squares_[step] += size * size;
      if (step > 0) above_[step - 1] += 1;
    }
    for (int64_t step = 1; step < kSteps; ++step) {
      sums_[step] += sums_[step - 1];
      squares_[step] += squares_[step - 1];
    }
    for (int64_t step = kSteps - 1; step-- > 0;) above_[step] += above_[step + 1];
  }

  double eps(int64_t step) const { return first_ * std::exp2(step / 2.0); }
  // The expected sum of squared errors.
  double error(int64_t step) const { return eps(step) * sums_[step] - squares_[step]; }
  // How many entries are above the cut, and how many of the others are expected to be kept.
  double above(int64_t step) const { return above_[step]; }
  double drawn(int64_t step) const { return sums_[step] / std::max(eps(step), kTiny); }

 private:
  // The first step whose cut is no less than `ratio` times the first; kSteps if there is none.
  static int64_t step_of(double ratio) {
    static const double last = std::exp2((kSteps - 1) / 2.0), root = std::sqrt(0.5);
    if (!(ratio <= last)) return kSteps;
    if (ratio <= 1) return 0;
    int exponent;
    const double fraction = std::frexp(ratio, &exponent);  // in [1/2, 1)
    return 2 * (exponent - 1) + (fraction > 0.5) + (fraction > root);
  }

  double first_;
  double sums_[kSteps + 1] = {}, squares_[kSteps + 1] = {};  // of the sizes up to each cut
  double above_[kSteps + 1] = {};
};

// A row on its way to its entries. It is read once, where guesses on the way hold: the only cut
// that is safe from the beginning may be far below the one that is chosen, and then most of the
// candidates are in vain.
class Choice {
 public:
  Choice(const Tile& tile, const Extraction& extraction, const EntryKernels& kernels, int64_t row,
         Candidate* candidates)
      : tile_(tile), extraction_(extraction), kernels_(kernels), row_(row) {
    scale_ = Scores(tile, row).dlogit;
    others_ = -std::expm1(double(extraction.logp[row]));
    allowed_ = std::pow(extraction.allowed[row] / scale_, 2);
    found_.begin = candidates;
  }

  void run() {
    // less than the first cut: the sizes' sum is `others_` at most, but for rounding
    const float safe = float(allowed_ / (others_ * (1 + 0x1p-10) + 0x1p-50));
    read(safe, true);
    if (!whole_ && !cut()) {
      read(safe, false);
      cut();
    }
    finish();
  }

 private:
  void read(float low, bool guess) {
    constexpr int64_t kMany = 1024;
    found_ = {found_.begin, found_.begin, low, 0, 0};
    int64_t enough = guess ? kMany : INT64_MAX;
    for (int64_t column = 0;;) {
      column = kernels_.scan(tile_, extraction_, row_, column, enough, found_);
      if (column >= tile_.columns) return;
      thin_out(double(column) / tile_.columns);
      enough = 2 * (found_.end - found_.begin) + kMany;
    }
  }

  // Drops candidates, once this `share` of the row has been read.
  void thin_out(double share) {
    constexpr double kCaution = 2;  // times the error that the rest of the row promises
    const Cuts cuts(found_, found_.low);
    int64_t step = 0;
    while (step < kSteps - 1 && !(cuts.error(step) > allowed_)) ++step;
    // what is to come can only make the cut smaller, and the entries more
    whole_ = cuts.error(step) > allowed_ &&
             1 + cuts.above(step) + cuts.drawn(step) > extraction_.out.slots;
    if (whole_) return raise(INFINITY);
    while (step > 0 && !(cuts.error(step) * kCaution <= allowed_ * share)) --step;
    if (step > 0) raise(float(cuts.eps(step)));
  }

  void raise(float low) {
    Candidate* end = found_.begin;
    for (const Candidate* one = found_.begin; one < found_.end; ++one) {
      const double size = one->size;
      if (!found_.summed(*one) && one->size <= low) {
        found_.sum += size;
        found_.squares += size * size;
      }
      if (uniform(key(), one->column) * low < size) *end++ = *one;
    }
    found_.end = end;
    found_.low = low;
  }

  // Finds the largest cut within the allowed error; false if it is below what has been guessed.
  bool cut() {
    double total = found_.sum;
    for (const Candidate* one = found_.begin; one < found_.end; ++one) {
      if (!found_.summed(*one)) total += one->size;
    }
    const Cuts cuts(found_, allowed_ / std::max(total, kTiny));
    int64_t chosen = 0;
    for (int64_t step = 1; step < kSteps; ++step) {
      // cuts below `low` are within the error if one above is
      if (cuts.eps(step) >= found_.low && !(cuts.error(step) <= allowed_)) break;
      chosen = step;
    }
    eps_ = cuts.eps(chosen);
    expected_ = 1 + cuts.above(chosen) + cuts.drawn(chosen) + 4 * std::sqrt(cuts.drawn(chosen));
    return !(eps_ < found_.low * (1 + 0x1p-20));  // the scan's arithmetic is fp32
  }

  // What is kept of a size.
  double kept(const Candidate& one) const {
    if (one.size > eps_) return one.size;
    return uniform(key(), one.column) * eps_ < one.size ? eps_ : 0;
  }

  void finish() {
    const Entries& out = extraction_.out;
    int32_t* ids = out.ids + row_ * out.slots;
    float* values = out.values + row_ * out.slots;
    const double at_target = others_ * kernels_.target_curve(tile_, row_);
    ids[0] = int32_t(tile_.target[row_]);
    values[0] = float(at_target * scale_);
    int64_t count = 1;
    double l1 = found_.sum, error = found_.squares, squares = found_.squares;
    for (const Candidate* one = found_.begin; one < found_.end; ++one) {
      const double size = one->size, summed = found_.summed(*one), value = kept(*one);
      l1 += std::abs(value - size) - summed * size;
      error += (value - size) * (value - size) - summed * size * size;
      squares += (1 - summed) * size * size;
      if (value == 0) continue;
      if (count < out.slots) {
        ids[count] = one->column;
        values[count] = float(-value * scale_);
      }
      ++count;
    }
    const bool fits = !whole_ && expected_ <= out.slots && count <= out.slots;
    out.used[row_] = fits ? int32_t(count) : kWhole;
    extraction_.error[row_] = fits ? float(std::sqrt(std::max(error, 0.0)) * scale_) : 0;
    extraction_.error_l1[row_] = fits ? float(std::max(l1, 0.0) * scale_) : 0;
    extraction_.norm[row_] = float(std::sqrt(at_target * at_target + squares) * scale_);
  }

  int32_t key() const { return extraction_.keys[row_]; }

  const Tile& tile_;
  const Extraction& extraction_;
  const EntryKernels& kernels_;
  const int64_t row_;
  double scale_;
  double others_;   // 1 - p
  double allowed_;  // the expected sum of squared errors
  Found found_;
  bool whole_ = false;
  double eps_, expected_;
};

}  // namespace

void extract_row(const Tile& tile, const Extraction& extraction, const EntryKernels& kernels,
                 int64_t row, Candidate* candidates) {
  const bool without_gradient = extraction.allowed[row] >= kAnyError;
  if (!without_gradient && std::isfinite(extraction.lse[row])) {
    return Choice(tile, extraction, kernels, row, candidates).run();
  }
  extraction.out.used[row] = without_gradient ? 0 : kWhole;
  extraction.error[row] = extraction.error_l1[row] = extraction.norm[row] = 0;
}

}  // namespace grpo
