// The collectives of the package's helpers, `unshard` and `masked_mean_loss`: agreed on and watched as attention is.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "binding/base/c10d_ops.h"
#include "binding/base/content_hash.h"
#include "binding/base/errors.h"
#include "binding/group/agreement.h"
#include "binding/group/live_call.h"
#include "binding/op/agreed_call.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using std::string;

struct Collective {
  string group_name;
  string signature;  // what all ranks have in common, in words
  string place;      // where the program made the call; "" unknown
  bool in_backward = false;
};

std::unique_ptr<LiveCall> agree_on(const Group& group, const Collective& collective) {
  if (!has_peers(group)) return std::make_unique<LiveCall>(group);
  const auto describe = [&] { return Fields{{"call", collective.signature, ""}}; };
  return std::move(Agreement::of(group)
                       ->agree(group, {.kind = CallKind::kOther,
                                       .is_in_backward = collective.in_backward,
                                       .hash = hash_text(collective.signature),
                                       .place = collective.place,
                                       .describe = describe})
                       .call);
}

// `post` gives the work and its result.
template <class Post>
Tensor run(const Tensor& tensor, const Collective& collective, Post&& post) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Group group = find_group(collective.group_name, tensor.device().type());
  // Backward enters by no public function that tells the peers.
  const auto agree = [&] { return agree_on(group, collective); };
  const std::unique_ptr<LiveCall> live = tell_peers(group, /*assume_agreed=*/false, agree);
  return live->run([&] {
    live->reach({.step = 0});
    auto [work, result] = post(group);
    live->reach({.step = 0, .waits = true});
    if (work) live->finish(work, -1);
    return result;
  });
}

// Of a group that is written in Python, which has this method only.
c10::intrusive_ptr<c10d::Work> gather_in_python(const Group& group, Tensor& own, Tensor& gathered) {
  std::vector<Tensor> sent{own};
  std::vector<std::vector<Tensor>> received{gathered.view({group.size, -1}).unbind(0)};
  return group.process_group->allgather(received, sent);
}

using Posted = std::pair<c10::intrusive_ptr<c10d::Work>, Tensor>;

// The sum over the ranks.
Tensor all_reduce(const Tensor& tensor, string group_name, string signature, string place, bool in_backward) {
  return run(tensor, {group_name, signature, place, in_backward}, [&](const Group& group) -> Posted {
    std::vector<Tensor> sums{tensor.clone(at::MemoryFormat::Contiguous)};
    if (group.size == 1) return {nullptr, sums[0]};
    return {group.process_group->allreduce(sums), sums[0]};
  });
}

// [world, ...]: `tensor` of every rank.
Tensor all_gather(const Tensor& tensor, string group_name, string signature, string place) {
  return run(tensor, {group_name, signature, place}, [&](const Group& group) -> Posted {
    Tensor own = tensor.contiguous();
    std::vector<int64_t> shape = own.sizes().vec();
    shape.insert(shape.begin(), group.size);
    Tensor gathered = at::empty(shape, own.options());
    if (group.size == 1) return {nullptr, gathered.copy_(own.unsqueeze(0))};
    Tensor flat = gathered.view({-1}), sent = own.view({-1});
    if (!group.backend) return {gather_in_python(group, sent, flat), gathered};
    return {post_c10d("_allgather_base_", {flat, sent, group.process_group}), gathered};
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  m.def("_all_reduce(Tensor tensor, str group_name, str signature, str place, bool in_backward) -> Tensor",
        kTranslated<&all_reduce>);
  m.def("_all_gather(Tensor tensor, str group_name, str signature, str place) -> Tensor", kTranslated<&all_gather>);
}

}  // namespace ringspan::binding
