// The choice of a row's entries from its candidates.
#include "entries.h"

#include <algorithm>
#include <cmath>

namespace grpo {
namespace {

// Of the search for a row's cut, which is that of `grpo_kernels/backends/entries.py`.
constexpr int kReads = 2;
constexpr double kStart = 0.01, kLeastPower = 0.125;
constexpr int32_t kWhole = -1;
constexpr double kTiny = 1e-100;
constexpr double kMost = 0x1p59;  // so that a cut is finite in the units of a scan
constexpr double kAnyError = 1e30;  // or more: the row has no gradient

double uniform(int32_t key, int32_t column) {
  const uint32_t hashed = mixed(uint32_t(key) + uint32_t(column) * kGolden);
  return ((hashed >> 8) + 0.5) * 0x1p-24;
}

// A row on its way to its entries. It is read a second time only where the first cut is too large:
// the candidates of a cut tell of all larger ones.
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
    const double least = std::min(allowed_ / std::max(others_, kTiny), kMost);
    const double most = std::max(2 * least, others_ / 2);
    float cut = float(std::sqrt(least * (least + kStart * others_)));
    read(cut);
    for (int i = 0; i < kReads; ++i) {
      const Share below = share(cut);
      const double error = cut * below.sum - below.squares;
      const double ratio = allowed_ / std::max(error, kTiny);
      eps_ = std::max(eps_, float(cut * std::min(ratio, 1.0)));
      if (eps_ < found_.low) {
        if (below.kept(cut) > extraction_.out.slots) break;  // a smaller cut keeps no fewer
        read(eps_);
      }
      const double power = std::max(error / std::max(cut * below.sum, kTiny), kLeastPower);
      cut = std::max(float(std::min(cut * std::pow(ratio, power), most)), eps_);
    }
    finish();
  }

 private:
  // What a cut means for a row.
  struct Share {
    double sum, squares;  // of the sizes up to it
    double above;         // how many are larger

    double drawn(double cut) const { return sum / std::max(cut, kTiny); }  // all are expected
    double kept(double cut) const { return 1 + above + drawn(cut); }
  };

  void read(float low) {
    found_ = {found_.begin, found_.begin, low, 0, 0};
    kernels_.scan(tile_, extraction_, row_, found_);
  }

  // Of a cut that is no less than what the candidates are for.
  Share share(float cut) const {
    Share all{found_.sum, found_.squares, 0};
    for (const Candidate* one = found_.begin; one < found_.end; ++one) {
      const double size = one->size, below = one->size <= cut && !found_.summed(*one);
      all.sum += below * size;
      all.squares += below * size * size;
      all.above += one->size > cut;
    }
    return all;
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
    const Share below = share(eps_);
    const double expected = below.kept(eps_) + 4 * std::sqrt(below.drawn(eps_));
    const bool fits = expected <= out.slots && count <= out.slots;
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
  float eps_ = 0;  // the cut
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
