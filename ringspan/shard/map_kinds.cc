#include "ringspan/shard/map_kinds.h"

#include "ringspan/base/error.h"
#include "ringspan/base/words.h"

namespace ringspan {
namespace {

ShardMap build_contiguous(const MapArguments& a) { return ShardMap::contiguous(a.seq_len, a.world); }
ShardMap build_head_tail(const MapArguments& a) { return ShardMap::head_tail(a.seq_len, a.world); }
ShardMap build_striped(const MapArguments& a) { return ShardMap::striped(a.seq_len, a.world); }
ShardMap build_balanced(const MapArguments& a) { return ShardMap::balanced(*a.mask, a.world); }

ShardMap build_lengths(const MapArguments& a) {
  const auto count = static_cast<int64_t>(a.lengths.size());
  RINGSPAN_CHECK(count == a.world, "shard lengths: ", count, " were given for ", a.world,
                 " ranks; give one length per rank");
  ShardMap map = ShardMap::from_lengths(a.lengths);
  RINGSPAN_CHECK(map.seq_len() == a.seq_len, "shard lengths add up to ", map.seq_len(),
                 " positions and the sequence has ", a.seq_len, "; change one of them");
  return map;
}

ShardMap build_per_document(const MapArguments& a) { return ShardMap::per_document(a.lengths, a.world, a.seq_len); }

constexpr MapKind kMaps[] = {
    // name, alias, list, build
    {"contiguous", "", "", build_contiguous},
    {"head_tail", "zigzag", "", build_head_tail},
    {"striped", "", "", build_striped},
    {"lengths", "", "LEN,...", build_lengths},
    {"segments", "", "", nullptr},
    {"balanced", "", "", build_balanced},
    {"per_document", "", "LEN,...", build_per_document},
};

}  // namespace

std::span<const MapKind> map_kinds() { return kMaps; }

std::vector<std::string> plain_map_names() {
  std::vector<std::string> names;
  for (const MapKind& kind : kMaps) {
    if (kind.build != nullptr && kind.lengths.empty()) names.emplace_back(kind.name);
  }
  return names;
}

ShardMap parse_shard_map(std::string_view text, const MaskSpec& mask, int64_t seq_len, int64_t world) {
  const size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  for (const MapKind& kind : kMaps) {
    const bool is_named = name == kind.name || (!kind.alias.empty() && name == kind.alias);
    if (!is_named || kind.build == nullptr || kind.lengths.empty() != (colon == std::string_view::npos)) continue;
    MapArguments arguments{.seq_len = seq_len, .world = world, .mask = &mask};
    if (!kind.lengths.empty()) arguments.lengths = numbers_of(text.substr(colon + 1), text);
    return kind.build(arguments);
  }
  throw Error(concat("shard \"", text, "\" is unknown; use ", map_help()));
}

std::string map_help() {
  std::vector<std::string> names;
  for (const MapKind& kind : kMaps) {
    if (kind.build == nullptr) continue;
    const std::string also = kind.alias.empty() ? std::string() : concat(" (or ", kind.alias, ")");
    names.push_back(concat(kind.name, also, kind.lengths.empty() ? "" : ":", kind.lengths));
  }
  return any_of(names);
}

}  // namespace ringspan
