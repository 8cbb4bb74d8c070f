#include "binding/group/torch_store.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "binding/base/errors.h"
#include "binding/base/tensors.h"

namespace ringspan::binding {
namespace {

int64_t num_elements(const Transfer& transfer, const Problem& problem) {
  return transfer.num_elements(size_of(transfer.payload, problem).dim);
}

// The transfer's rows of a tensor [batch, heads, rows, dim] at one of its ends.
std::vector<at::Tensor> pieces_of(const Transfer& transfer, const ringspan::Place& place, const at::Tensor& tensor) {
  if (place.slot != kOwnSlot) {
    const int64_t rows = transfer.num_rows(), end = rows == 0 ? place.row : place.row + (rows - 1) * place.stride + 1;
    return {tensor.slice(2, place.row, end, place.stride)};
  }
  std::vector<at::Tensor> pieces;
  for (const RowRange& range : transfer.rows) pieces.push_back(tensor.slice(2, range.begin, range.end));
  return pieces;
}

void copy_rows(const std::vector<at::Tensor>& from, const at::Tensor& message) {
  int64_t row = 0;
  for (const at::Tensor& piece : from) {
    message.narrow(2, row, piece.size(2)).copy_(piece);
    row += piece.size(2);
  }
}

std::vector<int64_t> shape_of(const Transfer& transfer, const Problem& problem) {
  return {transfer.batch_end - transfer.batch_begin, transfer.head_end - transfer.head_begin, transfer.num_rows(),
          size_of(transfer.payload, problem).dim};
}

// "k and v", "dq": the tensors that travel with this one, as far as a message of failure names them.
std::string names_of(const Transfer& transfer) {
  if (!is_of_kv(transfer.payload)) return name_of(transfer.payload);
  return is_gradient(transfer.payload) ? "dk and dv" : "k and v";
}

}  // namespace

TorchStore::TorchStore(const Group& group, Exchange exchange, const RankPlan& part, const std::vector<Step>& steps,
                       const at::Tensor& like)
    : group_(group), kind_(exchange), part_(part), uses_(part, steps), options_(like.options().requires_grad(false)) {
  if (group.size == 1) return;
  exchange_ = exchange == Exchange::kP2p ? make_p2p(group) : make_all_to_all(group);
  if (exchange == Exchange::kAllGather) all_gather_ = make_all_gather(group);
}

TorchStore::~TorchStore() {
  // After a failure: what still travels may write into our buffers until it is waited for. The first failure is the one
  // that is reported.
  int64_t lost = -1;
  for (Journey& journey : journeys_) {
    try {
      if (journey.way) journey.way->finish(journey.flight, lost);
    } catch (const std::exception&) {
    }
  }
}

void TorchStore::bind(Payload payload, const TensorView& tensor) {
  own_views_[payload] = tensor;
  own_.erase(payload);
}

void TorchStore::bind(Payload payload, at::Tensor tensor) {
  own_[payload] = std::move(tensor);
  own_views_.erase(payload);
}

at::ScalarType TorchStore::dtype_of(Payload payload) const {
  if (payload == Payload::kBias || payload == Payload::kMask) {
    const auto view = own_views_.find(payload);
    return view != own_views_.end() ? torch_dtype(view->second.dtype) : own_.at(payload).scalar_type();
  }
  const DType dtype = part_.problem.dtype;
  const bool is_input = size_of(payload, part_.problem).element_bytes == size_of(dtype);
  return torch_dtype(is_input ? dtype : accumulator_of(dtype));
}

// A tensor over the caller's memory is made only where one is sent.
at::Tensor TorchStore::own(Payload payload) {
  const auto known = own_.find(payload);
  if (known != own_.end()) return known->second;
  const TensorView& view = own_views_.at(payload);
  at::Tensor tensor = at::from_blob(view.data, at::IntArrayRef(view.size.data(), 4),
                                    at::IntArrayRef(view.stride.data(), 4), options_.dtype(torch_dtype(view.dtype)));
  own_[payload] = tensor;
  return tensor;
}

at::Tensor TorchStore::slot(Payload payload, int64_t slot, int64_t rows, const HeadRange& heads) {
  const auto sized = [&](Payload one) {
    const PayloadSize size = size_of(one, part_.problem);
    return std::vector<int64_t>{size.batch, heads.end - heads.begin, rows, size.dim};
  };
  at::Tensor& tensor = slots_[{payload, slot}];
  if (tensor.defined() && tensor.sizes() == sized(payload)) return tensor;
  if (payload != Payload::kDk && payload != Payload::kDv) {
    tensor = at::empty(sized(payload), options_.dtype(dtype_of(payload)));
    return tensor;
  }
  // These two travel together, and so are one piece of memory.
  const std::vector<int64_t> k = sized(Payload::kDk), v = sized(Payload::kDv);
  const int64_t num_k = c10::multiply_integers(k), num_v = c10::multiply_integers(v);
  const at::Tensor flat = at::empty({num_k + num_v}, options_.dtype(dtype_of(payload)));
  slots_[{Payload::kDk, slot}] = flat.narrow(0, 0, num_k).view(k);
  slots_[{Payload::kDv, slot}] = flat.narrow(0, num_k, num_v).view(v);
  return slots_[{payload, slot}];
}

at::Tensor TorchStore::tensor(Payload payload, const Operand& operand) {
  if (operand.slot == kOwnSlot) return own(payload);
  return slot(payload, operand.slot, operand.rows, heads_of(payload, part_.problem, operand));
}

TensorView TorchStore::view(Payload payload, const Operand& operand) {
  const auto own_view = own_views_.find(payload);
  if (operand.slot == kOwnSlot && own_view != own_views_.end()) return own_view->second;
  const at::Tensor held = tensor(payload, operand);
  if (payload != Payload::kMask) return mutable_view(held);
  TensorView bytes(static_cast<std::byte*>(held.data_ptr()), DType::kByte, {}, {});
  std::copy_n(held.sizes().begin(), 4, bytes.size.begin());
  std::copy_n(held.strides().begin(), 4, bytes.stride.begin());
  return bytes;
}

at::Tensor TorchStore::tensor_at(const Transfer& transfer, const ringspan::Place& place) {
  const bool is_own = place.slot == kOwnSlot;
  const at::Tensor whole = is_own ? own(transfer.payload)
                                  : slot(transfer.payload, place.slot, place.rows, {place.head_begin, place.head_end});
  const int64_t first_head = is_own ? 0 : place.head_begin;
  return whole.slice(0, transfer.batch_begin, transfer.batch_end)
      .slice(1, transfer.head_begin - first_head, transfer.head_end - first_head);
}

void TorchStore::post(std::span<const Transfer> transfers) {
  if (transfers.empty()) return;
  for (const Transfer& transfer : transfers) {
    if (transfer.is_sent()) continue;
    journeys_.push_back({transfer.needed_by, is_gradient(transfer.payload), &transfer, {}, nullptr, {{&transfer, {}}}});
  }
  for (const Post& post : posts_of(transfers, part_.problem)) post_message(post);
}

void TorchStore::post_message(const Post& post) {
  Message message;
  message.sent.assign(part_.world, 0);
  message.received.assign(part_.world, 0);
  const Transfer* named = post.transfers.front();
  for (const Transfer* transfer : post.transfers) {
    if (transfer->dst != part_.rank) continue;
    message.received[transfer->src] += num_elements(*transfer, part_.problem);
    if (named->dst != part_.rank) named = transfer;
    // Nobody reads any more what lay there; the memory may be used again.
    if (replaces_slot(*transfer, part_.problem)) {
      slots_.erase({transfer->payload, transfer->to.slot});
    }
  }
  const bool gathers = is_gathered(post, kind_);
  message.send = gathers ? pack_padded(post) : pack(post, message.sent);
  message.tag = ((post.transfers.front()->step * 2 + (post.gradients ? 1 : 0)) * 4 + static_cast<int64_t>(post.kind));
  Journey journey{post.needed_by, post.gradients, named};
  FlatExchange* const way = gathers ? all_gather_.get() : exchange_.get();
  guard_peer(*named, way->collective(), [&](int64_t& lost) {
    journey.flight = way->start(message, lost);
    journey.way = way;
    if (waits_at_post()) way->finish(journey.flight, lost);
  });
  take_pieces(post, journey);
  journeys_.push_back(std::move(journey));
}

// What goes to each rank, in the order of the ranks.
at::Tensor TorchStore::pack(const Post& post, std::vector<int64_t>& sent) {
  int64_t total = 0;
  for (const Transfer* transfer : post.transfers) {
    if (transfer->src != part_.rank) continue;
    sent[transfer->dst] += num_elements(*transfer, part_.problem);
    total += num_elements(*transfer, part_.problem);
  }
  at::Tensor flat = ready_message(post);
  if (flat.defined()) return flat;
  flat = at::empty({total}, options_.dtype(dtype_of(post.transfers.front()->payload)));
  std::vector<int64_t> next(part_.world, 0);
  for (int64_t dst = 1; dst < part_.world; ++dst) next[dst] = next[dst - 1] + sent[dst - 1];
  for (const Transfer* transfer : post.transfers) {
    if (transfer->src != part_.rank) continue;
    const int64_t count = num_elements(*transfer, part_.problem);
    const at::Tensor piece = flat.narrow(0, next[transfer->dst], count).view(shape_of(*transfer, part_.problem));
    copy_rows(pieces_of(*transfer, transfer->from, tensor_at(*transfer, transfer->from)), piece);
    next[transfer->dst] += count;
  }
  return flat;
}

// This rank's rows once, and zeros up to the longest shard.
at::Tensor TorchStore::pack_padded(const Post& post) {
  const at::ScalarType dtype = dtype_of(post.transfers.front()->payload);
  const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  at::Tensor flat = at::empty({gathered_bytes(post, part_.problem) / bytes}, options_.dtype(dtype));
  int64_t used = 0, dst = -1;
  for (const Transfer* transfer : post.transfers) {
    if (transfer->src != part_.rank || (dst >= 0 && transfer->dst != dst)) continue;
    dst = transfer->dst;
    const int64_t count = num_elements(*transfer, part_.problem);
    copy_rows(pieces_of(*transfer, transfer->from, tensor_at(*transfer, transfer->from)),
              flat.narrow(0, used, count).view(shape_of(*transfer, part_.problem)));
    used += count;
  }
  flat.narrow(0, used, flat.numel() - used).zero_();
  return flat;
}

// Whole slots that go to one rank and lie one behind the other, as they do where they came in one message.
at::Tensor TorchStore::ready_message(const Post& post) const {
  at::Tensor first;
  int64_t dst = -1, end = 0, total = 0;
  for (const Transfer* transfer : post.transfers) {
    if (transfer->src != part_.rank) continue;
    const auto found = slots_.find({transfer->payload, transfer->from.slot});
    if (found == slots_.end() || !fills_slot(*transfer, transfer->from, part_.problem)) return {};
    const at::Tensor& tensor = found->second;
    const bool follows = !first.defined() || (tensor.is_alias_of(first) && tensor.storage_offset() == end);
    if (!follows || (dst >= 0 && dst != transfer->dst)) return {};
    if (!first.defined()) first = tensor;
    dst = transfer->dst;
    end = tensor.storage_offset() + tensor.numel();
    total += tensor.numel();
  }
  return first.defined() ? first.as_strided({total}, {1}) : at::Tensor();
}

void TorchStore::take_pieces(const Post& post, Journey& journey) {
  const bool gathers = is_gathered(post, kind_);
  const int64_t padded = journey.flight.received.numel() / part_.world;
  int64_t begin = 0;
  for (int64_t src = 0; src < part_.world; ++src) {
    if (gathers) begin = src * padded;
    for (const Transfer* transfer : post.transfers) {
      if (transfer->src != src || transfer->dst != part_.rank) continue;
      const int64_t count = num_elements(*transfer, part_.problem);
      const at::Tensor rows = journey.flight.received.narrow(0, begin, count).view(shape_of(*transfer, part_.problem));
      begin += count;
      if (replaces_slot(*transfer, part_.problem)) {
        slots_[{transfer->payload, transfer->to.slot}] = rows;
      } else {
        journey.arrivals.push_back({transfer, rows});
      }
    }
  }
}

bool TorchStore::awaits(int64_t step, bool gradients) const {
  return std::any_of(journeys_.begin(), journeys_.end(),
                     [&](const Journey& journey) { return journey.is_due(step, gradients); });
}

void TorchStore::wait(int64_t step, bool gradients) {
  std::vector<Arrival> arrivals;
  for (auto journey = journeys_.begin(); journey != journeys_.end();) {
    if (!journey->is_due(step, gradients)) {
      ++journey;
      continue;
    }
    if (journey->way) {
      guard_peer(*journey->named, journey->way->collective(),
                 [&](int64_t& lost) { journey->way->finish(journey->flight, lost); });
    }
    arrivals.insert(arrivals.end(), journey->arrivals.begin(), journey->arrivals.end());
    journey = journeys_.erase(journey);
  }
  // In the order of the plan, which is that of the additions; the transfers of a list lie one behind the other.
  std::stable_sort(arrivals.begin(), arrivals.end(), [](const Arrival& a, const Arrival& b) {
    return a.transfer->step != b.transfer->step ? a.transfer->step < b.transfer->step : a.transfer < b.transfer;
  });
  for (const Arrival& arrival : arrivals) place(arrival);
  free_slots(step, gradients);
}

void TorchStore::free_slots(int64_t step, bool gradients) {
  std::erase_if(slots_, [&](const auto& entry) {
    const auto [payload, slot] = entry.first;
    return is_gradient(payload) == gradients && uses_.is_done(payload, slot, step);
  });
}

void TorchStore::place(const Arrival& arrival) {
  const Transfer& transfer = *arrival.transfer;
  const std::vector<at::Tensor> targets = pieces_of(transfer, transfer.to, tensor_at(transfer, transfer.to));
  at::Tensor rows = arrival.rows;
  if (!rows.defined()) {
    const std::vector<at::Tensor> sources = pieces_of(transfer, transfer.from, tensor_at(transfer, transfer.from));
    rows = sources.size() == 1 ? sources.front() : at::cat(sources, 2);
  }
  int64_t row = 0;
  for (const at::Tensor& target : targets) {
    const at::Tensor part = rows.narrow(2, row, target.size(2));
    transfer.adds ? target.add_(part) : target.copy_(part);
    row += target.size(2);
  }
}

// Runs a c10d action; what it throws becomes the loss of a peer.
template <class Action>
void TorchStore::guard_peer(const Transfer& named, const char* collective, Action&& action) const {
  int64_t lost = -1;
  try {
    action(lost);
  } catch (const std::exception& error) {
    const int64_t peer = lost >= 0 ? lost : named.dst == part_.rank ? named.src : named.dst;
    const std::string doubt =
        *collective ? concat(" or another rank, for an ", collective, " fails as a whole,") : std::string();
    throw_peer_error(concat("rank ", part_.rank, " lost peer ", peer, doubt, " in step ", named.step, " (transfer: ",
                            names_of(named), " of rank ", named.owner, " from rank ", named.src, " to rank ", named.dst,
                            "): ", message_of(error), ". Make a new process group before the next call"));
  }
}

}  // namespace ringspan::binding
