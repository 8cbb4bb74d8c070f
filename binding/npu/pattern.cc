#include "binding/npu/pattern.h"

#include <algorithm>
#include <utility>

#include "ringspan/base/error.h"

namespace ringspan::binding {
namespace {

constexpr int64_t kColumns = 6;

std::vector<int64_t> words_of(const std::vector<Band>& bands) {
  std::vector<int64_t> words;
  words.reserve(bands.size() * kColumns);
  for (const Band& b : bands) {
    words.insert(words.end(), {b.q_begin, b.q_end, b.kv_begin, b.kv_end, b.lo, b.hi});
  }
  return words;
}

void append_list(const std::vector<int64_t>& list, std::vector<int64_t>& words) {
  words.push_back(static_cast<int64_t>(list.size()));
  words.insert(words.end(), list.begin(), list.end());
}

}  // namespace

ContractMap::ContractMap(const char* name, const std::optional<at::Tensor>& map, int64_t own_rows, int64_t world)
    : world_(world), seq_len_(own_rows * world), is_given_(map.has_value()) {
  if (!map) return;
  RINGSPAN_CHECK(
      map->scalar_type() == at::kLong && map->device().is_cpu() && map->dim() == 2 && map->size(1) == kColumns, name,
      " is ", toString(map->scalar_type()), " ", map->sizes(), " on ", map->device().str(),
      "; it must be int64 [n, 6] on the CPU");
  const at::Tensor dense = map->contiguous();
  const auto* data = dense.const_data_ptr<int64_t>();
  seq_len_ = 0;
  words_.assign(static_cast<size_t>(world), 0);
  for (int64_t i = 0; i < dense.size(0); ++i) {
    const int64_t* row = data + i * kColumns;
    const int64_t list = row[0], rank = row[1], local = row[2], begin = row[3], length = row[4], stride = row[5];
    RINGSPAN_CHECK(-1 <= rank && rank < world && length >= 0 && local >= 0, name, " row ", i, " is of rank ", rank,
                   ", local row ", local, ", length ", length, "; the group has ", world, " ranks");
    if (rank >= 0) words_[rank] = std::max(words_[rank], local + length);
    seq_len_ = std::max(seq_len_, rank < 0 ? length : length == 0 ? 0 : begin + (length - 1) * stride + 1);
    if (rank < 0 || length == 0) continue;
    RINGSPAN_CHECK(0 <= list && list <= dense.size(0), name, " row ", i, " is of batch list ", list,
                   "; lists are counted from 0");
    words_.insert(words_.end(), row, row + kColumns);
  }
}

ShardMap ContractMap::build() const {
  if (!is_given_) return ShardMap::contiguous(seq_len_, world_);
  const auto world = static_cast<size_t>(world_);
  std::vector<std::vector<std::vector<Segment>>> segments(1, std::vector<std::vector<Segment>>(world));
  for (size_t i = world; i < words_.size(); i += kColumns) {
    const int64_t* row = words_.data() + i;
    if (segments.size() <= static_cast<size_t>(row[0])) {
      segments.resize(static_cast<size_t>(row[0]) + 1, std::vector<std::vector<Segment>>(world));
    }
    segments[row[0]][row[1]].push_back({.local_row = row[2], .begin = row[3], .length = row[4], .stride = row[5]});
  }
  return ShardMap::from_segments(seq_len_, std::move(segments), {words_.begin(), words_.begin() + world_});
}

ContractPattern::ContractPattern(const ContractCall& call, ContractMap q_map, ContractMap kv_map, int64_t world)
    : sizes_{.world = world, .batch = call.sizes.batch, .q_len = call.q_len, .kv_len = call.kv_len},
      mask_(call.mask),
      q_map_(std::move(q_map)),
      kv_map_(std::move(kv_map)) {}

void ContractPattern::append_content(std::vector<int64_t>& words) const {
  // -1: no spec begins so, which shares the cache.
  words.insert(words.end(),
               {-1, sizes_.world, sizes_.batch, sizes_.q_len, sizes_.kv_len, static_cast<int64_t>(mask_.kind)});
  append_list(mask_.prefix, words);
  append_list(words_of(mask_.bands), words);
  append_list(q_map_.words(), words);
  append_list(kv_map_.words(), words);
}

Decoded ContractPattern::build() const {
  return {.world = sizes_.world,
          .batch = sizes_.batch,
          .q_len = sizes_.q_len,
          .kv_len = sizes_.kv_len,
          .mask = mask_.build(sizes_.q_len, sizes_.kv_len),
          .q_map = q_map_.build(),
          .kv_map = kv_map_.build()};
}

Fields ContractPattern::describe() const {
  const auto text = [](const std::vector<int64_t>& words) {
    return words.empty() ? std::string("none") : text_of(c10::ArrayRef<int64_t>(words));
  };
  return {{"bands of the mask", text(words_of(mask_.bands))},
          {"prefix of the mask", text(mask_.prefix)},
          {"q_map", text(q_map_.words())},
          {"kv_map", text(kv_map_.words())}};
}

}  // namespace ringspan::binding
