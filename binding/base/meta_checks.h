// Meta kernels know shapes only: what they return is uninitialised. PyTorch chooses them for one tensor on meta among
// others, so they check that all lie there.
#pragma once

#include "ringspan/base/error.h"

#include "binding/base/record.h"

namespace ringspan::binding {

// Tables and numbers may lie on the CPU beside operands on meta, but not the other way round.
template <class Record>
bool is_all_meta(const Record& record) {
  bool all = true;
  for_each_tensor(record, [&](const FieldInfo& info, const at::Tensor& tensor) {
    all = all && (tensor.is_meta() || info.dtype == DtypeRule::kHost);
  });
  return all;
}

// Of a record whose operands do not all lie on meta: Error naming one that does and one that does not.
template <class Record>
[[noreturn]] void throw_mixed_devices(const Record& record) {
  const char *on_meta = "none", *elsewhere = "none";
  std::string device = "meta";
  for_each_tensor(record, [&](const FieldInfo& info, const at::Tensor& tensor) {
    (tensor.is_meta() ? on_meta : elsewhere) = info.name;
    if (!tensor.is_meta()) device = tensor.device().str();
  });
  throw Error(concat(on_meta, " lies on meta, ", elsewhere, " on ", device, "; put them on one device"));
}

template <class Record>
void check_all_meta(const Record& record) {
  if (!is_all_meta(record)) throw_mixed_devices(record);
}

}  // namespace ringspan::binding
