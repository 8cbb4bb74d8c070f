#include "binding/op/pattern.h"

#include "ringspan/base/error.h"

namespace ringspan::binding {

DescribedPattern::DescribedPattern(at::IntArrayRef spec, at::TensorList tables)
    : description_{.spec = {spec.data(), spec.size()}, .tables = {}} {
  for (size_t i = 0; i < tables.size(); ++i) {
    const at::Tensor& table = tables[i];
    RINGSPAN_CHECK(table.scalar_type() == at::kLong && table.device().is_cpu(), "table ", i, " is ",
                   toString(table.scalar_type()), " on ", table.device().str(), "; tables are int64 on the CPU");
    dense_.push_back(table.contiguous());
    description_.tables.push_back({table.sizes().vec(), dense_.back().const_data_ptr<int64_t>()});
  }
}

void DescribedPattern::append_content(std::vector<int64_t>& words) const {
  size_t total = words.size() + 1 + description_.spec.size();
  for (const Table& table : description_.tables) total += 1 + table.size.size() + table.num_elements();
  words.reserve(total);
  words.push_back(static_cast<int64_t>(description_.spec.size()));
  words.insert(words.end(), description_.spec.begin(), description_.spec.end());
  for (const Table& table : description_.tables) {
    words.push_back(static_cast<int64_t>(table.size.size()));
    words.insert(words.end(), table.size.begin(), table.size.end());
    words.insert(words.end(), table.data, table.data + table.num_elements());
  }
}

Fields DescribedPattern::describe() const {
  DescriptionText text = ringspan::binding::describe(description_);
  return {
      {"mask", std::move(text.mask)}, {"shard_map", std::move(text.q_map)}, {"kv_shard_map", std::move(text.kv_map)}};
}

}  // namespace ringspan::binding
