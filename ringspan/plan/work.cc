#include "ringspan/plan/work.h"

namespace ringspan {

int64_t kept_pairs(const Step& step) {
  int64_t pairs = 0;
  for (const Tile& tile : step.tiles) pairs += count_pairs(tile);
  return pairs;
}

}  // namespace ringspan
