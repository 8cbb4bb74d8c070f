// A dense grid of kept pairs: the slow oracle of masks and tiles. It counts how often each pair is kept.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

namespace ringspan::testing {

class PairGrid {
 public:
  PairGrid(int64_t rows, int64_t columns) : rows_(rows), columns_(columns), counts_(rows * columns, 0) {}

  static PairGrid of(int64_t rows, int64_t columns, const std::function<bool(int64_t, int64_t)>& keeps) {
    PairGrid grid(rows, columns);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        if (keeps(i, j)) grid.add(i, j);
      }
    }
    return grid;
  }

  void add(int64_t i, int64_t j) { ++counts_.at(i * columns_ + j); }
  int64_t total() const {
    int64_t sum = 0;
    for (int count : counts_) sum += count;
    return sum;
  }
  bool operator==(const PairGrid&) const = default;

  friend std::ostream& operator<<(std::ostream& out, const PairGrid& grid) {
    for (int64_t i = 0; i < grid.rows_; ++i) {
      out << "\n  ";
      for (int64_t j = 0; j < grid.columns_; ++j) {
        const int count = grid.counts_[i * grid.columns_ + j];
        out << (count == 0 ? std::string(".") : std::to_string(count));
      }
    }
    return out;
  }

 private:
  int64_t rows_, columns_;
  std::vector<int> counts_;
};

}  // namespace ringspan::testing
