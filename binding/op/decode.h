// decode: from the description that crosses the dispatcher (docs/decisions/call-description.md) to masks and maps.
// No Torch in here: a table is a dense array of int64.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ringspan/mask/mask_spec.h"
#include "ringspan/shard/shard_map.h"

namespace ringspan::binding {

// The first word of a spec.
inline constexpr int64_t kSpecVersion = 1;

struct Table {
  std::vector<int64_t> size;
  const int64_t* data = nullptr;

  int64_t num_elements() const;
};

// Borrowed: lives as long as the call's arguments.
struct Description {
  std::span<const int64_t> spec;
  std::vector<Table> tables;
};

struct Decoded {
  int64_t world = 1, batch = 1, q_len = 0, kv_len = 0;
  MaskSpec mask;
  ShardMap q_map, kv_map;
};

// The fixed part of a spec; Error where it is too short or of another version. Costs nothing.
struct SpecSizes {
  int64_t world = 1, batch = 1, q_len = 0, kv_len = 0;
};
SpecSizes read_sizes(std::span<const int64_t> spec);

// Error naming the part that is wrong: an unknown code, a missing operand, a table that is absent or has another shape.
Decoded decode(const Description& description);

// The parts in words, for messages: short tables in full, of long ones the first values and a hash of all. Different
// content gives a different text.
struct DescriptionText {
  std::string mask, q_map, kv_map;
};
DescriptionText describe(const Description& description);

}  // namespace ringspan::binding
