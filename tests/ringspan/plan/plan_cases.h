// Questions that the plan tests share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringspan/plan/plan.h"

namespace ringspan::testing {

inline Problem problem_of(int64_t q_len, int64_t kv_len, int64_t batch = 1) {
  return {.batch = batch,
          .q_heads = 4,
          .kv_heads = 2,
          .q_len = q_len,
          .kv_len = kv_len,
          .qk_dim = 24,
          .v_dim = 16,
          .dtype = DType::kBF16,
          .scale = 0.31};
}

inline MaskSpec causal(int64_t length) { return MaskSpec::causal(length, length, Corner::kTopLeft); }

struct NamedMap {
  std::string name;
  ShardMap map;
};

// Every way to split 16 positions that has its own code path: uneven and empty shards, padding rows, strides.
inline std::vector<NamedMap> maps_of_sixteen() {
  std::vector<std::vector<Segment>> padded(3);
  padded[0] = {{.local_row = 2, .begin = 0, .length = 3}, {.local_row = 6, .begin = 9, .length = 2, .stride = 3}};
  padded[1] = {{.local_row = 1, .begin = 3, .length = 6}, {.local_row = 0, .begin = 15, .length = 1}};
  padded[2] = {{.local_row = 0, .begin = 10, .length = 2}, {.local_row = 3, .begin = 13, .length = 2}};
  return {{"contiguous", ShardMap::contiguous(16, 4)},
          {"head_tail", ShardMap::head_tail(16, 3)},
          {"striped", ShardMap::striped(16, 4)},
          {"lengths 3,5,2,6", ShardMap::from_lengths({3, 5, 2, 6})},
          {"lengths 7,0,9", ShardMap::from_lengths({7, 0, 9})},
          {"padding rows", ShardMap::from_segments(16, {padded}, {9, 7, 8})}};
}

}  // namespace ringspan::testing
