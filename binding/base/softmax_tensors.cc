#include "binding/base/softmax_tensors.h"

#include <tuple>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "ringspan/softmax/empty_row.h"

namespace ringspan::binding {

using at::Tensor;

JoinedParts join_parts(const Tensor& max, const Tensor& sum, const Tensor& part_max, const Tensor& part_sum) {
  const Tensor joint = at::maximum(max, part_max), zero = at::zeros({}, joint.options());
  // Two maxima of -inf are measured from 0: -inf - -inf is NaN.
  const Tensor reference = at::where(joint == kEmptyRowMax, zero, joint);
  const Tensor weight = sum * (max - reference).exp(), part_weight = part_sum * (part_max - reference).exp();
  const Tensor total = weight + part_weight, empty = total == 0;
  const auto share = [&](const Tensor& of) { return at::where(empty, zero, of / total); };
  return {joint, total, share(weight), share(part_weight)};
}

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  m.def(
      "_join_softmax(Tensor max, Tensor sum, Tensor part_max, Tensor part_sum) -> (Tensor max, Tensor sum, "
      "Tensor share, Tensor part_share)",
      [](const Tensor& max, const Tensor& sum, const Tensor& part_max, const Tensor& part_sum) {
        const JoinedParts joined = join_parts(max, sum, part_max, part_sum);
        return std::tuple(joined.max, joined.sum, joined.share, joined.part_share);
      });
}

}  // namespace ringspan::binding
