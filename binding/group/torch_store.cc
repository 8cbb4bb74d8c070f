#include "binding/group/torch_store.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "binding/base/errors.h"
#include "binding/base/tensors.h"

namespace ringspan::binding {
namespace {

// The transfer's rows of a tensor [batch, heads, rows, dim] at one of its ends.
std::vector<at::Tensor> pieces_of(const Transfer& transfer, const BufferPlace& place, const at::Tensor& tensor) {
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
const char* names_of(const Transfer& transfer) {
  if (!is_of_kv(transfer.payload)) return name_of(transfer.payload);
  return is_gradient(transfer.payload) ? "dk and dv" : "k and v";
}

}  // namespace

TorchStore::TorchStore(LiveCall& call, const Group& group, Exchange exchange, const RankPlan& part,
                       const std::vector<Step>& steps, const at::Tensor& like)
    : SlotBook(part, steps, exchange), call_(call), options_(like.options().requires_grad(false)) {
  if (group.size == 1) return;
  exchange_ = exchange == Exchange::kP2p ? make_p2p(group) : make_all_to_all(group);
  if (exchange == Exchange::kAllGather) all_gather_ = make_all_gather(group);
}

TorchStore::~TorchStore() {
  // After a failure: what still travels may write into our buffers. Nobody waits for it here.
  std::vector<LiveCall::Work> works;
  for (auto& [journey, flight] : flights_) {
    for (auto& [peer, work] : flight.works) works.push_back(std::move(work));
  }
  if (!works.empty()) call_.keep(std::move(works));
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
  return torch_dtype(element_type(payload));
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

at::Tensor TorchStore::tensor_in(const Area& area, const std::vector<int64_t>& shape) const {
  const at::Tensor& memory = memory_.at(area.block);
  const int64_t element = static_cast<int64_t>(memory.element_size());
  return memory.narrow(0, area.offset / element, area.bytes / element).view(shape);
}

at::Tensor TorchStore::flat_in(const Area& area, at::ScalarType dtype) const {
  if (area.block == kNoBlock) return at::empty({0}, options_.dtype(dtype));
  return tensor_in(area, {area.bytes / static_cast<int64_t>(c10::elementSize(dtype))});
}

at::Tensor TorchStore::tensor_of(Payload payload, int64_t number, int64_t rows, const HeadRange& heads) {
  if (number == kOwnSlot) return own(payload);
  const PayloadSize size = size_of(payload, part_.problem);
  return tensor_in(slot(payload, number, rows, heads), {size.batch, heads.end - heads.begin, rows, size.dim});
}

at::Tensor TorchStore::tensor(Payload payload, const Operand& operand) {
  return tensor_of(payload, operand.slot, operand.rows, heads_of(payload, part_.problem, operand));
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

at::Tensor TorchStore::tensor_at(const Transfer& transfer, const BufferPlace& place) {
  const at::Tensor whole = tensor_of(transfer.payload, place.slot, place.rows, {place.head_begin, place.head_end});
  const int64_t first_head = place.slot == kOwnSlot ? 0 : place.head_begin;
  return whole.slice(0, transfer.batch_begin, transfer.batch_end)
      .slice(1, transfer.head_begin - first_head, transfer.head_end - first_head);
}

void TorchStore::on_make(Block block, int64_t bytes, Payload payload) {
  const at::ScalarType dtype = dtype_of(payload);
  memory_[block] = at::empty({bytes / static_cast<int64_t>(c10::elementSize(dtype))}, options_.dtype(dtype));
}

void TorchStore::on_start(const Journey& journey) {
  const at::ScalarType dtype = dtype_of(journey.post.transfers.front()->payload);
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t packed = 0;
  for (const MessagePart& piece : journey.packed) {
    const Transfer& t = *piece.transfer;
    copy_rows(pieces_of(t, t.from, tensor_at(t, t.from)), tensor_in(piece.area, shape_of(t, part_.problem)));
    packed += piece.area.bytes;
  }
  Message message;
  message.send = flat_in(journey.sent, dtype);
  message.tag = tag_of(journey.post);
  // What a gathered piece is padded with.
  if (journey.is_gathered) message.send.narrow(0, packed / element, (journey.sent.bytes - packed) / element).zero_();
  const auto elements_by_rank = [&](const std::vector<PeerSize>& peers) {
    std::vector<int64_t> elements(static_cast<size_t>(part_.world), 0);
    for (const PeerSize& one : peers) elements[static_cast<size_t>(one.peer)] = one.bytes / element;
    return elements;
  };
  message.sent = elements_by_rank(journey.sends);
  message.received = elements_by_rank(journey.receives);
  reach(journey, /*waits=*/false);
  Flight& flight = flights_[&journey] = way_of(journey).start(message, call_);
  if (waits_at_post()) finish(flight, call_);
  memory_[journey.received.block] = flights_.at(&journey).received;
}

void TorchStore::on_finish(const std::vector<const Journey*>& journeys) {
  for (const Journey* journey : journeys) {
    if (!journey->is_sent()) continue;
    reach(*journey, /*waits=*/true);
    finish(flights_.at(journey), call_);
    flights_.erase(journey);
  }
}

void TorchStore::on_arrival(const MessagePart& piece) {
  const Transfer& transfer = *piece.transfer;
  const std::vector<at::Tensor> targets = pieces_of(transfer, transfer.to, tensor_at(transfer, transfer.to));
  at::Tensor rows;
  if (piece.area.block != kNoBlock) {
    rows = tensor_in(piece.area, shape_of(transfer, part_.problem));
  } else {
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

// The transfer that is named is one that arrives.
void TorchStore::reach(const Journey& journey, bool waits) {
  const std::vector<const Transfer*>& transfers = journey.post.transfers;
  const auto arrives = std::find_if(transfers.begin(), transfers.end(),
                                    [&](const Transfer* transfer) { return transfer->dst == part_.rank; });
  const Transfer& named = arrives == transfers.end() ? *transfers.front() : **arrives;
  call_.reach({.step = named.step,
               .waits = waits,
               .tensors = names_of(named),
               .owner = named.owner,
               .from = named.src,
               .to = named.dst});
}

}  // namespace ringspan::binding
