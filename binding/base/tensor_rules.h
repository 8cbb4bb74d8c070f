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

}  // namespace ringspan::binding
