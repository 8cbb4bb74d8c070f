// What a record's fields say of their tensors, checked.
#pragma once

#include <string>

#include "ringspan/base/dtype.h"
#include "ringspan/base/error.h"

#include "binding/base/record.h"
#include "binding/base/tensors.h"

namespace ringspan::binding {

// "" where `dtype` is right by the rule in a call on tensors of `call`, else what it must be.
inline std::string wanted_dtype(DtypeRule rule, at::ScalarType dtype, DType call) {
  const bool is_double = call == DType::kF64;
  switch (rule) {
    case DtypeRule::kAccumulator:
      return dtype == at::kFloat || (is_double && dtype == at::kDouble) ? "" : is_double ? "Float or Double" : "Float";
    case DtypeRule::kWidens:
      if (is_double) return dtype == at::kFloat || dtype == at::kDouble ? "" : "Float or Double";
      return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ? "" : "Float, BFloat16 or Half";
    case DtypeRule::kBool: return dtype == at::kBool ? "" : "Bool";
    default: return "";
  }
}

// Error naming the first argument of another dtype, with both, or that is no plain strided tensor.
template <class Record>
void check_tensors(const Record& record, DType call) {
  for_each_tensor(record, [&](const FieldInfo& info, const at::Tensor& tensor) {
    RINGSPAN_CHECK(tensor.layout() == at::kStrided, info.name, " has layout ", concat(tensor.layout()),
                   "; it must be a plain strided tensor");
    const std::string wanted = wanted_dtype(info.dtype, tensor.scalar_type(), call);
    RINGSPAN_CHECK(wanted.empty(), info.name, " is ", toString(tensor.scalar_type()), "; it must be ", wanted,
                   " beside query of ", name_of(call));
  });
}

// Meta kernels know shapes only: what they return is uninitialised. PyTorch chooses them for one tensor on meta among
// others, so they check that all lie there.
//
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
