// Shard maps by name: one table, by which the command line reads maps, the planner chooses and the binding decodes the
// words that cross PyTorch's dispatcher (docs/decisions/call-description.md).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ringspan/shard/shard_map.h"

namespace ringspan {

// What a map is made from, once it is read.
struct MapArguments {
  int64_t seq_len = 0, world = 1;
  const MaskSpec* mask = nullptr;  // what "balanced" balances
  std::vector<int64_t> lengths{};
};

struct MapKind {
  std::string_view name, alias;                      // alias: "" = none
  std::string_view lengths;                          // what its list holds, such as "LEN,..."; "" = it has none
  ShardMap (*build)(const MapArguments& arguments);  // null: only a table of segments makes it
};

// The first kNumMapCodes have codes, their places; others reach a call as segments.
std::span<const MapKind> map_kinds();
enum MapCode : int64_t { kContiguousMap, kHeadTailMap, kStripedMap, kLengthsMap, kSegmentsMap, kNumMapCodes };

// Names of maps that need nothing but a length, a number of ranks and a mask: what a planner tries.
std::vector<std::string> plain_map_names();

// "head_tail" (or "zigzag"), "lengths:3,5"; `mask` is what "balanced" balances. Error naming what does not fit.
ShardMap parse_shard_map(std::string_view text, const MaskSpec& mask, int64_t seq_len, int64_t world);
// All names, for messages and help.
std::string map_help();

}  // namespace ringspan
