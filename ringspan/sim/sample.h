// Sample: the ranks of a large world that are built; each other one does what the one that stands for it does, moved
// by the distance between them.
//
//     world 12, blocks of 2, 3 blocks built:   0 1 . . . .   4 5 . .   10 11
//     stands for                               0 1 0 1 4 5   4 5 4 5   10 11      (the nearest block)
//
// Exact where all ranks are built. Else the parts of ranks in between are estimates; their messages keep their places
// in a team or node, which are whole blocks.
#pragma once

#include <cstdint>
#include <vector>

namespace ringspan::detail {

class Sample {
 public:
  // Every rank up to `most` ranks, else about `most` of them in evenly spread blocks, the first and last among them.
  Sample(int64_t world, int64_t block, int64_t most);

  int64_t world() const { return world_; }
  bool is_whole() const { return static_cast<int64_t>(ranks_.size()) == world_; }
  const std::vector<int64_t>& ranks() const { return ranks_; }
  // Index in ranks() of the one that stands for `rank`.
  int64_t index_for(int64_t rank) const { return index_[rank]; }

 private:
  int64_t world_;
  std::vector<int64_t> ranks_;
  std::vector<int64_t> index_;
};

}  // namespace ringspan::detail
