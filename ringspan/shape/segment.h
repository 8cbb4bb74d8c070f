// Segment: a run of local rows that holds an arithmetic progression of global positions.
//
//   local row   local_row   local_row+1      ...  local_row+length-1
//   position    begin       begin+stride     ...  begin+(length-1)*stride
#pragma once

#include <cstdint>

namespace ringspan {

// The longest sequence. The number of pairs of two such sequences still fits in 63 bits.
constexpr int64_t kMaxLength = int64_t{1} << 31;

struct Segment {
  int64_t local_row = 0;
  int64_t begin = 0;
  int64_t length = 0;  // > 0 in every ShardMap
  int64_t stride = 1;  // > 0

  int64_t position(int64_t offset) const { return begin + offset * stride; }
  bool operator==(const Segment&) const = default;
};

}  // namespace ringspan
