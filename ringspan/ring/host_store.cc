#include "ringspan/ring/host_store.h"

#include <algorithm>
#include <utility>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

// Calls action(rows of `tensor`, the same rows of the dense `message`) for each piece of the transfer.
template <class Action>
void for_each_piece(const Transfer& transfer, const BufferPlace& place, const TensorView& tensor,
                    const TensorView& message, Action&& action) {
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

std::string names_of(const Post& post, int64_t src, int64_t dst) {
  std::string names;
  for (const Transfer* t : post.transfers) {
    if (t->src == src && t->dst == dst) names += concat(names.empty() ? "" : " and ", name_of(t->payload));
  }
  return names;
}

}  // namespace

HostStore::~HostStore() {
  for (const PostedMessage& message : messages_) transport_.cancel(message.request);
}

void HostStore::bind(Payload payload, const TensorView& tensor) { own_[payload] = tensor; }

DType HostStore::dtype_of(Payload payload) const {
  return payload == Payload::kBias || payload == Payload::kMask ? own_.at(payload).dtype : element_type(payload);
}

TensorView HostStore::tensor_in(Payload payload, int64_t number, int64_t rows, const HeadRange& heads) {
  if (number == kOwnSlot) return own_.at(payload);
  const PayloadSize size = size_of(payload, part_.problem);
  return view_of(at(slot(payload, number, rows, heads)), dtype_of(payload), Layout::kBNSD,
                 {size.batch, heads.end - heads.begin, rows, size.dim});
}

TensorView HostStore::view(Payload payload, const Operand& operand) {
  return tensor_in(payload, operand.slot, operand.rows, heads_of(payload, part_.problem, operand));
}

TensorView HostStore::tensor_at(const Transfer& transfer, const BufferPlace& place) {
  const TensorView whole = tensor_in(transfer.payload, place.slot, place.rows, {place.head_begin, place.head_end});
  const TensorView entries = narrow(whole, 0, transfer.batch_begin, transfer.batch_end);
  const int64_t first_head = place.slot == kOwnSlot ? 0 : place.head_begin;
  return narrow(entries, 1, transfer.head_begin - first_head, transfer.head_end - first_head);
}

TensorView HostStore::message_at(const Transfer& transfer, std::byte* data) const {
  return view_of(data, dtype_of(transfer.payload), Layout::kBNSD,
                 {transfer.batch_end - transfer.batch_begin, transfer.head_end - transfer.head_begin,
                  transfer.num_rows(), size_of(transfer.payload, part_.problem).dim});
}

void HostStore::on_start(const Journey& journey) {
  memory_[journey.received.block] = Buffer(journey.received.bytes);
  for (const MessagePart& piece : journey.packed) {
    if (piece.area.bytes == 0) continue;
    const Transfer& t = *piece.transfer;
    for_each_piece(t, t.from, tensor_at(t, t.from), message_at(t, at(piece.area)),
                   [](const TensorView& rows, const TensorView& part) { copy(rows, part); });
  }
  for (const bool arrives : {false, true}) post_messages(journey, arrives);
}

// One to, or from, each rank that has a part.
void HostStore::post_messages(const Journey& journey, bool arrives) {
  const int64_t tag = tag_of(journey.post);
  std::byte* data = nullptr;
  for (const PeerSize& one : arrives ? journey.receives : journey.sends) {
    if (one.bytes == 0) continue;
    if (!data) data = at(arrives ? journey.received : journey.sent);
    const auto size = static_cast<size_t>(one.bytes);
    const auto named = std::find_if(journey.post.transfers.begin(), journey.post.transfers.end(),
                                    [&](const Transfer* t) { return (arrives ? t->src : t->dst) == one.peer; });
    const Transport::Request request =
        arrives ? transport_.post_recv(one.peer, tag, {data, size}) : transport_.post_send(one.peer, tag, {data, size});
    messages_.push_back({&journey, request, *named, arrives});
    data += size;
  }
}

// Receives first: a send is complete only when its receiver has waited.
void HostStore::on_finish(const std::vector<const Journey*>& journeys) {
  for (const bool arrives : {true, false}) {
    for (size_t i = 0; i < messages_.size();) {
      const PostedMessage message = messages_[i];
      const bool is_due = std::find(journeys.begin(), journeys.end(), message.journey) != journeys.end();
      if (!is_due || message.arrives != arrives) {
        ++i;
        continue;
      }
      finish(message);
      messages_.erase(messages_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

void HostStore::finish(const PostedMessage& message) {
  const Transfer& named = *message.named;
  try {
    transport_.wait(message.request);
  } catch (const TransportError& error) {
    throw TransportError(
        error.rank, error.peer, named.step,
        concat(error.what(), " (step ", named.step, ", ", names_of(message.journey->post, named.src, named.dst),
               " from rank ", named.src, " to rank ", named.dst, ")"));
  }
}

// Where both ends are here, through a message of the same kind, so that there is one way to place rows.
void HostStore::on_arrival(const MessagePart& piece) {
  if (piece.area.bytes == 0) return;
  const Transfer& t = *piece.transfer;
  Buffer between;
  if (piece.area.block == kNoBlock) {
    between = Buffer(piece.area.bytes);
    for_each_piece(t, t.from, tensor_at(t, t.from), message_at(t, between.data()),
                   [](const TensorView& rows, const TensorView& part) { copy(rows, part); });
  }
  const TensorView message = message_at(t, piece.area.block == kNoBlock ? between.data() : at(piece.area));
  for_each_piece(t, t.to, tensor_at(t, t.to), message,
                 [&](const TensorView& rows, const TensorView& part) { t.adds ? add(part, rows) : copy(part, rows); });
}

}  // namespace ringspan
