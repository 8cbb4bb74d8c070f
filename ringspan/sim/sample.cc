#include "ringspan/sim/sample.h"

#include <algorithm>

namespace ringspan::detail {

Sample::Sample(int64_t world, int64_t block, int64_t most) : world_(world) {
  const int64_t num_blocks = world / block;
  const int64_t built = world <= most ? num_blocks : std::min(num_blocks, std::max<int64_t>(2, most / block));
  std::vector<int64_t> blocks;
  for (int64_t k = 0; k < built; ++k) blocks.push_back(built == 1 ? 0 : k * (num_blocks - 1) / (built - 1));
  for (const int64_t b : blocks) {
    for (int64_t place = 0; place < block; ++place) ranks_.push_back(b * block + place);
  }
  size_t nearest = 0;
  for (int64_t rank = 0; rank < world; ++rank) {
    const int64_t b = rank / block;
    while (nearest + 1 < blocks.size() && blocks[nearest + 1] - b < b - blocks[nearest]) ++nearest;
    index_.push_back(static_cast<int64_t>(nearest) * block + rank % block);
  }
}

}  // namespace ringspan::detail
