#include "ringspan/shape/problem.h"

#include <cmath>
#include <iterator>
#include <sstream>
#include <utility>

#include "ringspan/base/error.h"
#include "ringspan/base/words.h"

namespace ringspan {
namespace {

void check_range(const char* field, int64_t value, int64_t least, int64_t most) {
  RINGSPAN_CHECK(least <= value && value <= most, field, " is ", value, "; it must be in ", least, "..", most);
}

}  // namespace

const char* name_of(Layout layout) {
  const auto index = static_cast<size_t>(layout);
  RINGSPAN_CHECK(index < std::size(kLayoutNames), "layout ", index, " is unknown");
  return kLayoutNames[index];
}

Layout parse_layout(std::string_view name) {
  for (size_t index = 0; index < std::size(kLayoutNames); ++index) {
    if (name == kLayoutNames[index]) return static_cast<Layout>(index);
  }
  throw Error(
      concat("layout \"", name, "\" is unknown; use ", any_of({std::begin(kLayoutNames), std::end(kLayoutNames)})));
}

void Problem::check() const {
  check_range("batch", batch, 1, kMaxLength);
  check_range("q_heads", q_heads, 1, kMaxLength);
  check_range("kv_heads", kv_heads, 1, kMaxLength);
  RINGSPAN_CHECK(q_heads % kv_heads == 0, "q_heads ", q_heads, " is not a multiple of kv_heads ", kv_heads,
                 "; every KV head must serve the same number of query heads");
  check_range("q_len", q_len, 0, kMaxLength);
  check_range("kv_len", kv_len, 0, kMaxLength);
  check_range("qk_dim", qk_dim, 1, kMaxHeadDim);
  check_range("v_dim", v_dim, 1, kMaxHeadDim);
  name_of(dtype);
  name_of(layout);
  RINGSPAN_CHECK(layout != Layout::kTND || batch == 1, "batch is ", batch, " in layout TND, which has no batch axis");
  RINGSPAN_CHECK(std::isfinite(scale), "scale is ", scale,
                 "; it must be finite (default_scale() gives 1/sqrt(qk_dim))");
  const DType accumulator = accumulator_of(dtype);
  RINGSPAN_CHECK(is_finite_as(accumulator, scale), "scale is ", scale, ", which is infinite in ", name_of(accumulator),
                 "; scores of ", name_of(dtype), " are computed in that");
  RINGSPAN_CHECK(is_finite_as(accumulator, scale * static_cast<double>(qk_dim)), "scale is ", scale, " and qk_dim ",
                 qk_dim, ": a score of vectors of ones would be infinite in ", name_of(accumulator));
  for (const auto& [name, tensor] : {std::pair("bias", &bias), std::pair("mask", &mask)}) {
    if (!tensor->is_given()) continue;
    RINGSPAN_CHECK((tensor->batch == 1 || tensor->batch == batch) && (tensor->heads == 1 || tensor->heads == q_heads),
                   name, " has ", tensor->batch, " batch entries and ", tensor->heads, " heads, the problem ", batch,
                   " and ", q_heads, "; each must be 1 or as many");
    check_range(name, tensor->element_bytes, 1, 8);
  }
}

std::string Problem::str() const {
  std::ostringstream text;
  text << "batch " << batch << ", heads " << q_heads << "/" << kv_heads << ", q_len " << q_len << ", kv_len " << kv_len
       << ", qk_dim " << qk_dim << ", v_dim " << v_dim << ", " << name_of(dtype) << ", " << name_of(layout)
       << ", scale " << scale;
  if (bias.is_given()) text << ", bias by rows";
  if (mask.is_given()) text << ", mask by rows";
  return text.str();
}

double default_scale(int64_t qk_dim) { return 1.0 / std::sqrt(static_cast<double>(qk_dim)); }

}  // namespace ringspan
