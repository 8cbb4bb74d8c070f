#include "ringspan/ring/host_backend.h"

#include <algorithm>
#include <cstring>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

bool is_k_like(Payload payload) { return payload == Payload::kK || payload == Payload::kDk; }

// Backends take const views of inputs; a slot may stand for them but is then only read.
TensorView without_const(const ConstTensorView& view) {
  return {const_cast<std::byte*>(view.data), view.dtype, view.size, view.stride};
}

bool lies_in_one_piece(const TensorView& view) {
  const TensorView dense = view_of(view.data, view.dtype, Layout::kBNSD, view.size);
  for (int axis = 0; axis < 4; ++axis) {
    if (view.size[axis] > 1 && view.stride[axis] != dense.stride[axis]) return false;
  }
  return true;
}

TensorView narrow(TensorView view, int axis, int64_t begin, int64_t end) {
  view.data += begin * view.stride[axis] * size_of(view.dtype);
  view.size[axis] = end - begin;
  return view;
}

// Rows of a message in the order of its row ranges: [batch, heads, all rows, dim], dense.
template <class Copy>
void for_each_range(const Transfer& transfer, const TensorView& tensor, const TensorView& message, Copy&& copy_rows) {
  int64_t row = 0;
  for (const RowRange& range : transfer.rows) {
    const int64_t count = range.end - range.begin;
    copy_rows(narrow(tensor, 2, range.begin, range.end), narrow(message, 2, row, row + count));
    row += count;
  }
}

}  // namespace

SlotExchange::SlotExchange(const RankPlan& part, Transport& transport, DType dtype, Pair own)
    : part_(part), transport_(transport), dtype_(dtype), own_(own) {}

SlotExchange::~SlotExchange() {
  for (const auto& [key, flight] : flights_) transport_.cancel(flight.request);
}

SlotExchange::Pair SlotExchange::slot(int64_t slot, int64_t owner) {
  if (slot == kOwnSlot) return own_;
  const Problem& problem = part_.problem;
  const int64_t element = size_of(dtype_);
  const auto bytes_for = [&](int64_t rows, int64_t dim) {
    return problem.batch * problem.kv_heads * rows * dim * element;
  };
  Buffer& buffer = slots_[slot];
  if (!buffer.data()) {
    const int64_t most_rows = *std::max_element(part_.kv_rows.begin(), part_.kv_rows.end());
    buffer = Buffer(bytes_for(most_rows, problem.qk_dim + problem.v_dim));
  }
  const int64_t rows = part_.kv_rows[owner];
  std::byte* v_data = buffer.data() + bytes_for(rows, problem.qk_dim);
  return {view_of(buffer.data(), dtype_, Layout::kBNSD, {problem.batch, problem.kv_heads, rows, problem.qk_dim}),
          view_of(v_data, dtype_, Layout::kBNSD, {problem.batch, problem.kv_heads, rows, problem.v_dim})};
}

SlotExchange::FlightKey SlotExchange::key_of(const Transfer& transfer) {
  return {transfer.step, static_cast<int64_t>(transfer.payload), transfer.src, transfer.dst};
}

TensorView SlotExchange::view_of_transfer(const Transfer& transfer, int64_t slot) {
  const Pair pair = this->slot(slot, transfer.owner);
  TensorView view = is_k_like(transfer.payload) ? pair.k : pair.v;
  view = narrow(view, 0, transfer.batch_begin, transfer.batch_end);
  return narrow(view, 1, transfer.head_begin, transfer.head_end);
}

void SlotExchange::post(std::span<const Transfer> transfers) {
  for (const Transfer& transfer : transfers) {
    const bool sends = transfer.src == part_.rank;
    const TensorView tensor = view_of_transfer(transfer, sends ? transfer.src_slot : transfer.dst_slot);
    TensorView message = tensor;
    std::optional<Buffer> staging;
    const bool whole = transfer.rows.size() == 1 && transfer.num_rows() == tensor.rows() && lies_in_one_piece(tensor);
    const int64_t bytes = bytes_of(transfer, part_.problem);
    if (!whole) {
      staging = Buffer(bytes);
      message = view_of(staging->data(), dtype_, Layout::kBNSD,
                        {tensor.batch(), tensor.heads(), transfer.num_rows(), tensor.dim()});
      if (sends) for_each_range(transfer, tensor, message, [](const auto& from, const auto& to) { copy(from, to); });
    }
    const int64_t tag = transfer.step * 16 + static_cast<int64_t>(transfer.payload);
    const auto size = static_cast<size_t>(bytes);
    const Transport::Request request = sends ? transport_.post_send(transfer.dst, tag, {message.data, size})
                                             : transport_.post_recv(transfer.src, tag, {message.data, size});
    flights_.emplace(key_of(transfer), Flight{request, std::move(staging)});
  }
}

void SlotExchange::wait(std::span<const Transfer> transfers) {
  // Receives first: a send is complete only when its receiver has waited.
  for (const Transfer& transfer : transfers) {
    if (transfer.dst == part_.rank) complete(transfer);
  }
  for (const Transfer& transfer : transfers) {
    if (transfer.src == part_.rank) complete(transfer);
  }
}

void SlotExchange::complete(const Transfer& transfer) {
  const auto entry = flights_.find(key_of(transfer));
  RINGSPAN_CHECK(entry != flights_.end(), "transfer of step ", transfer.step, " was never posted");
  const Flight& flight = entry->second;
  try {
    transport_.wait(flight.request);
  } catch (const TransportError& error) {
    throw TransportError(error.rank, error.peer, transfer.step,
                         concat(error.what(), " (step ", transfer.step, ", ", name_of(transfer.payload), " from rank ",
                                transfer.src, " to rank ", transfer.dst, ")"));
  }
  if (flight.staging && transfer.dst == part_.rank) {
    const TensorView tensor = view_of_transfer(transfer, transfer.dst_slot);
    const TensorView message = view_of(flight.staging->data(), dtype_, Layout::kBNSD,
                                       {tensor.batch(), tensor.heads(), transfer.num_rows(), tensor.dim()});
    for_each_range(transfer, tensor, message, [](const auto& to, const auto& from) { copy(from, to); });
  }
  flights_.erase(entry);
}

HostForward::HostForward(const RankPlan& part, Transport& transport, const ConstTensorView& q, const ConstTensorView& k,
                         const ConstTensorView& v, const OutputView& output, const Extras& extras,
                         const Parallel& parallel)
    : kv_(part, transport, k.dtype, {without_const(k), without_const(v)}), local_(part, q, output, extras, parallel) {}

void HostForward::attend(const Step& step, bool begins, bool finishes) {
  const SlotExchange::Pair kv = kv_.slot(step.kv_slot, step.kv_owner);
  local_.attend(step.tiles, kv.k, kv.v, begins, finishes);
}

namespace {

// Gradients that start at the owner never stay at home; else they are summed there in the accumulator type.
TensorView home_of(const RankPlan& part, const TensorView& grad, Buffer& buffer) {
  const bool leaves = part.world > 1 && part.grad_route == GradRoute::kFromOwner;
  return leaves ? grad : accumulator_for(grad, buffer);
}

}  // namespace

HostBackward::HostBackward(const RankPlan& part, Transport& transport, const ConstTensorView& q,
                           const ConstTensorView& k, const ConstTensorView& v, const OutputView& output,
                           const ConstTensorView& dout, const ConstTensorView& dlse, const GradsView& grads,
                           const Extras& extras, const Parallel& parallel)
    : part_(part),
      grads_(grads),
      kv_(part, transport, k.dtype, {without_const(k), without_const(v)}),
      dkv_(part, transport, accumulator_of(k.dtype),
           {home_of(part, grads.dk, home_[0]), home_of(part, grads.dv, home_[1])}),
      local_(part.problem.scale, q, output.out, output.lse, dout, dlse, grads, extras, parallel) {}

void HostBackward::post(std::span<const Transfer> transfers) {
  if (!transfers.empty()) (is_kv_gradient(transfers.front()) ? dkv_ : kv_).post(transfers);
}

void HostBackward::wait(std::span<const Transfer> transfers) {
  if (!transfers.empty()) (is_kv_gradient(transfers.front()) ? dkv_ : kv_).wait(transfers);
}

void HostBackward::attend_backward(const Step& step, const std::function<void()>& arrived) {
  const SlotExchange::Pair kv = kv_.slot(step.kv_slot, step.kv_owner);
  const SlotExchange::Pair dkv = dkv_.slot(step.grad_slot, step.kv_owner);
  local_.attend(step.tiles, kv.k, kv.v, dkv.k, dkv.v, step.grad_begins, arrived);
}

void HostBackward::finish(const Step& last) {
  local_.finish();
  SlotExchange::Pair whole = dkv_.slot(kOwnSlot, part_.rank);
  if (!last.after.empty()) {
    const auto arrival = std::find_if(last.after.begin(), last.after.end(),
                                      [&](const Transfer& transfer) { return transfer.dst == part_.rank; });
    const SlotExchange::Pair arrived = dkv_.slot(arrival->dst_slot, part_.rank);
    if (part_.grad_route == GradRoute::kFromNext) {
      add(arrived.k, whole.k);
      add(arrived.v, whole.v);
    } else {
      whole = arrived;
    }
  }
  if (whole.k.data != grads_.dk.data) copy(whole.k, grads_.dk);
  if (whole.v.data != grads_.dv.data) copy(whole.v, grads_.dv);
}

}  // namespace ringspan
