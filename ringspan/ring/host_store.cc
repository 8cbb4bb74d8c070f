#include "ringspan/ring/host_store.h"

#include <algorithm>
#include <utility>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

bool lies_in_one_piece(const TensorView& view) {
  const TensorView dense = view_of(view.data, view.dtype, Layout::kBNSD, view.size);
  for (int axis = 0; axis < 4; ++axis) {
    if (view.size[axis] > 1 && view.stride[axis] != dense.stride[axis]) return false;
  }
  return true;
}

// Calls action(rows of `tensor`, the same rows of the dense `message`) for each piece of the transfer.
template <class Action>
void for_each_piece(const Transfer& transfer, const Place& place, const TensorView& tensor, const TensorView& message,
                    Action&& action) {
  int64_t row = 0;
  if (place.slot != kOwnSlot) {
    TensorView rows = narrow(tensor, 2, place.row, place.row + transfer.num_rows());
    rows.stride[2] *= place.stride;
    action(rows, message);
    return;
  }
  for (const RowRange& range : transfer.rows) {
    const int64_t count = range.end - range.begin;
    action(narrow(tensor, 2, range.begin, range.end), narrow(message, 2, row, row + count));
    row += count;
  }
}

// The one piece of memory in which the transfer's rows lie, in the order of the message; no tensor where they do not.
TensorView in_place(const Transfer& transfer, const Place& place, const TensorView& tensor) {
  TensorView found;
  int pieces = 0;
  for_each_piece(transfer, place, tensor, tensor, [&](const TensorView& rows, const TensorView&) {
    found = rows;
    ++pieces;
  });
  return pieces == 1 && lies_in_one_piece(found) ? found : TensorView{};
}

}  // namespace

HostStore::~HostStore() {
  for (const Flight& flight : flights_) {
    if (flight.transfer->is_sent()) transport_.cancel(flight.request);
  }
}

void HostStore::bind(Payload payload, const TensorView& tensor) { own_[payload] = tensor; }

DType HostStore::dtype_of(Payload payload) const {
  const Problem& p = part_.problem;
  switch (payload) {
    case Payload::kQ:
    case Payload::kK:
    case Payload::kV:
    case Payload::kOut:
    case Payload::kDout: return p.dtype;
    case Payload::kBias: return own_.at(payload).dtype;
    case Payload::kMask: return DType::kByte;
    default: return accumulator_of(p.dtype);
  }
}

TensorView HostStore::buffer_view(Payload payload, int64_t slot, int64_t rows, int64_t head_begin, int64_t head_end) {
  const PayloadSize size = size_of(payload, part_.problem);
  const DType dtype = dtype_of(payload);
  const std::array<int64_t, 4> shape{size.batch, head_end - head_begin, rows, size.dim};
  const auto [entry, is_new] = buffers_.try_emplace({payload, slot});
  Buffer& buffer = entry->second;
  if (is_new) buffer = Buffer(shape[0] * most_rows(payload, slot) * shape[3] * size_of(dtype));
  return view_of(buffer.data(), dtype, Layout::kBNSD, shape);
}

// Rows times heads of the largest use that the plan makes of a slot. What lies there may still be on its way when the
// slot is asked for again, so it is never made anew.
int64_t HostStore::most_rows(Payload payload, int64_t slot) const {
  int64_t most = 0;
  const auto use = [&](int64_t used_slot, int64_t rows, const HeadRange& heads) {
    if (used_slot == slot) most = std::max(most, rows * (heads.end - heads.begin));
  };
  const bool of_kv = is_of_kv(payload);
  for (const auto* steps : {&part_.forward, &part_.backward}) {
    for (const Step& step : *steps) {
      const Operand& operand = of_kv ? step.kv : step.q;
      const int64_t gradient_slot = (of_kv ? step.dkv : step.dq).slot;
      if (step.computes) {
        use(is_gradient(payload) ? gradient_slot : operand.slot, operand.rows,
            heads_of(payload, part_.problem, operand));
      }
      for (const auto* transfers : {&step.before, &step.after}) {
        for (const Transfer& transfer : *transfers) {
          if (transfer.payload != payload || transfer.dst != part_.rank) continue;
          use(transfer.to.slot, transfer.to.rows, {transfer.to.head_begin, transfer.to.head_end});
        }
      }
    }
  }
  return most;
}

TensorView HostStore::view(Payload payload, const Operand& operand) {
  if (operand.slot == kOwnSlot) return own_.at(payload);
  const HeadRange heads = heads_of(payload, part_.problem, operand);
  return buffer_view(payload, operand.slot, operand.rows, heads.begin, heads.end);
}

TensorView HostStore::tensor_at(const Transfer& transfer, const Place& place) {
  const bool is_own = place.slot == kOwnSlot;
  const TensorView whole =
      is_own ? own_.at(transfer.payload)
             : buffer_view(transfer.payload, place.slot, place.rows, place.head_begin, place.head_end);
  const TensorView entries = narrow(whole, 0, transfer.batch_begin, transfer.batch_end);
  const int64_t first_head = is_own ? 0 : place.head_begin;
  return narrow(entries, 1, transfer.head_begin - first_head, transfer.head_end - first_head);
}

void HostStore::post(std::span<const Transfer> transfers) {
  for (const Transfer& transfer : transfers) start(transfer);
}

void HostStore::start(const Transfer& transfer) {
  const int64_t bytes = bytes_of(transfer, part_.problem);
  if (bytes == 0) return;
  Flight flight{.transfer = &transfer};
  if (transfer.is_sent()) {
    const bool sends = transfer.src == part_.rank;
    const Place& place = sends ? transfer.from : transfer.to;
    const TensorView tensor = tensor_at(transfer, place);
    TensorView message = in_place(transfer, place, tensor);
    const DType dtype = dtype_of(transfer.payload);
    if (!message.is_given() || transfer.adds || message.dtype != dtype) {
      flight.message = Buffer(bytes);
      message = view_of(flight.message.data(), dtype, Layout::kBNSD,
                        {tensor.batch(), tensor.heads(), transfer.num_rows(), tensor.dim()});
      if (sends) {
        for_each_piece(transfer, place, tensor, message,
                       [](const TensorView& from, const TensorView& to) { copy(from, to); });
      }
    }
    const int64_t tag = transfer.step * kNumPayloads + static_cast<int64_t>(transfer.payload);
    const auto size = static_cast<size_t>(bytes);
    flight.request = sends ? transport_.post_send(transfer.dst, tag, {message.data, size})
                           : transport_.post_recv(transfer.src, tag, {message.data, size});
  }
  flights_.push_back(std::move(flight));
}

bool HostStore::Flight::is_due(int64_t step, bool gradients) const {
  return transfer->needed_by <= step && is_gradient(transfer->payload) == gradients;
}

bool HostStore::awaits(int64_t step, bool gradients) const {
  return std::any_of(flights_.begin(), flights_.end(),
                     [&](const Flight& flight) { return flight.is_due(step, gradients); });
}

void HostStore::wait(int64_t step, bool gradients) {
  // Receives first: a send is complete only when its receiver has waited.
  for (const bool receives : {true, false}) {
    for (size_t i = 0; i < flights_.size();) {
      if (!flights_[i].is_due(step, gradients) || (flights_[i].transfer->dst == part_.rank) != receives) {
        ++i;
        continue;
      }
      complete(flights_[i]);
      flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

void HostStore::complete(const Flight& flight) {
  const Transfer& transfer = *flight.transfer;
  if (!transfer.is_sent()) {
    copy_here(transfer);
    return;
  }
  try {
    transport_.wait(flight.request);
  } catch (const TransportError& error) {
    throw TransportError(error.rank, error.peer, transfer.step,
                         concat(error.what(), " (step ", transfer.step, ", ", name_of(transfer.payload), " from rank ",
                                transfer.src, " to rank ", transfer.dst, ")"));
  }
  if (!flight.message.data() || transfer.dst != part_.rank) return;
  const TensorView tensor = tensor_at(transfer, transfer.to);
  const TensorView message = view_of(flight.message.data(), dtype_of(transfer.payload), Layout::kBNSD,
                                     {tensor.batch(), tensor.heads(), transfer.num_rows(), tensor.dim()});
  for_each_piece(transfer, transfer.to, tensor, message, [&](const TensorView& rows, const TensorView& part) {
    transfer.adds ? add(part, rows) : copy(part, rows);
  });
}

// Both ends are here: through a message of the same kind, so that there is one way to place rows.
void HostStore::copy_here(const Transfer& transfer) {
  const Buffer memory(bytes_of(transfer, part_.problem));
  const TensorView from = tensor_at(transfer, transfer.from), to = tensor_at(transfer, transfer.to);
  const TensorView message = view_of(memory.data(), dtype_of(transfer.payload), Layout::kBNSD,
                                     {from.batch(), from.heads(), transfer.num_rows(), from.dim()});
  for_each_piece(transfer, transfer.from, from, message,
                 [](const TensorView& rows, const TensorView& part) { copy(rows, part); });
  for_each_piece(transfer, transfer.to, to, message, [&](const TensorView& rows, const TensorView& part) {
    transfer.adds ? add(part, rows) : copy(part, rows);
  });
}

}  // namespace ringspan
