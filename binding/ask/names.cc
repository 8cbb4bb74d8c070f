// Ops that tell Python the names and limits which the core's tables hold, so that none is written twice.
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Dict.h>
#include <torch/library.h>

#include "ringspan/mask/mask_kinds.h"
#include "ringspan/plan/exchange.h"
#include "ringspan/plan/schedule.h"
#include "ringspan/shape/problem.h"
#include "ringspan/shard/map_kinds.h"

#include "binding/npu/stats.h"
#include "binding/op/decode.h"

namespace ringspan::binding {
namespace {

using Names = std::vector<std::string>;

c10::Dict<std::string, Names> names() {
  Names schedules, split_schedules, exchanges, dtypes, long_dtypes, layouts, maps, masks;
  for (const ScheduleName& schedule : schedule_names()) {
    (schedule.inner.empty() ? schedules : split_schedules).emplace_back(schedule.name);
  }
  for (const std::string_view exchange : exchange_names()) exchanges.emplace_back(exchange);
  for (const DType dtype : kComputedTypes) {
    dtypes.emplace_back(name_of(dtype));
    long_dtypes.emplace_back(long_name_of(dtype));
  }
  for (const char* layout : kLayoutNames) layouts.emplace_back(layout);
  for (const MapKind& kind : map_kinds().first(kNumMapCodes)) maps.emplace_back(kind.name);
  for (const MaskKind& kind : mask_kinds()) masks.emplace_back(kind.name);
  c10::Dict<std::string, Names> all;
  all.insert("schedules", schedules);
  all.insert("split_schedules", split_schedules);
  all.insert("exchanges", exchanges);
  all.insert("dtypes", dtypes);
  all.insert("long_dtypes", long_dtypes);
  all.insert("layouts", layouts);
  all.insert("maps", maps);
  all.insert("plain_maps", plain_map_names());
  all.insert("masks", masks);
  return all;
}

c10::Dict<std::string, int64_t> limits() {
  c10::Dict<std::string, int64_t> all;
  all.insert("head_dim", kMaxHeadDim);
  all.insert("stat_slots", kStatSlots);
  all.insert("spec_version", kSpecVersion);
  return all;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  // "maps" and "masks" are in the order of their codes.
  m.def("_names() -> Dict(str, str[])", &names);
  m.def("_limits() -> Dict(str, int)", &limits);
}

}  // namespace ringspan::binding
