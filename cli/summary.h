// What plan and ledger print of many ranks: a few of them, and what all have together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ringspan::cli {

// More ranks than this are summed up unless all are asked for.
constexpr int64_t kMostRanks = 64;

// A number that each rank has, rank by rank.
class Measure {
 public:
  explicit Measure(std::string name) : name_(std::move(name)) {}

  void add(int64_t value) { values_.push_back(value); }
  const std::string& name() const { return name_; }
  // As double: pairs of very long sequences, times heads, do not fit in 64 bits.
  double total() const;
  double mean() const { return total() / static_cast<double>(values_.size()); }
  int64_t least() const { return std::ranges::min(values_); }
  int64_t most() const { return std::ranges::max(values_); }
  // The first rank that has most.
  int64_t busiest() const;
  bool is_equal() const { return least() == most(); }

 private:
  std::string name_;
  std::vector<int64_t> values_;
};

// The ranks that are shown, in their order: the first, the last, and who has most of each measure.
struct Pick {
  int64_t rank = 0;
  std::string why;
};
std::vector<Pick> picks_of(int64_t world, const std::vector<Measure>& measures);

// A line for each measure with total, least, mean and most, and how to see more.
std::string summary_of(int64_t world, const std::vector<Measure>& measures);

}  // namespace ringspan::cli
