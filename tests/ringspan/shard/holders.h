// Who holds what, as a picture that tests compare.
#pragma once

#include <string>

#include "ringspan/shard/shard_map.h"

namespace ringspan::testing {

// The rank of each position, counted from the local rows; '.' where nobody holds it, '!' where two do.
inline std::string holders(const ShardMap& map, int64_t batch = 0) {
  std::string text(map.seq_len(), '.');
  for (int64_t rank = 0; rank < map.world(); ++rank) {
    for (int64_t position : map.positions(rank, batch)) {
      if (position < 0) continue;
      char& mark = text.at(position);
      mark = mark == '.' ? static_cast<char>('0' + rank) : '!';
    }
  }
  return text;
}

}  // namespace ringspan::testing
