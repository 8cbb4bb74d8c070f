// Transfer: rows of one tensor that go from one rank to another. Plain integers; the store that runs a plan decides
// how to post it.
//
//            src, slot `from`                    message                       dst, slot `to`
//     [batch, heads, rows, dim]  ---->  [batch, heads, rows, dim], dense  ---->  [batch, heads, rows, dim]
#pragma once

#include <compare>
#include <cstdint>
#include <string_view>
#include <vector>

#include "ringspan/shape/problem.h"

namespace ringspan {

// What the rows are. Those of queries: q, out, max, sum, lse, dout, delta, dq, and a bias or a boolean mask that is
// split by query rows (Problem::bias, mask). Those of keys and values: k, v, dk, dv.
enum class Payload : uint8_t { kQ, kK, kV, kOut, kMax, kSum, kLse, kDout, kDelta, kBias, kMask, kDq, kDk, kDv, kDbias };
constexpr int64_t kNumPayloads = 15;

const char* name_of(Payload payload);          // "q", "k", ... "dbias"
Payload parse_payload(std::string_view name);  // the inverse

// Gradients are summed: they travel in the accumulator type, and later than what they belong to.
constexpr bool is_gradient(Payload payload) { return payload >= Payload::kDq; }
constexpr bool is_of_kv(Payload payload) {
  return payload == Payload::kK || payload == Payload::kV || payload == Payload::kDk || payload == Payload::kDv;
}

// Sizes of a payload's tensor besides its rows, for the whole call.
struct PayloadSize {
  int64_t batch = 0, heads = 0, dim = 0;
  int64_t element_bytes = 0;
};
PayloadSize size_of(Payload payload, const Problem& problem);

struct RowRange {
  int64_t begin = 0, end = 0;
  auto operator<=>(const RowRange&) const = default;
};

// Slot 0 is the caller's tensor of a rank (of gradients: what is summed at home); the others are buffers of the call.
constexpr int64_t kOwnSlot = 0;
constexpr int64_t kNumSlots = 8;
// In the place of an owner: rows of several.
constexpr int64_t kSeveral = -1;

// Where the rows of a transfer lie at one end. In kOwnSlot: in the owner's local rows. Elsewhere: in a dense buffer of
// `rows` rows and heads [head_begin, head_end), the first in row `row` and each other one `stride` rows further.
struct BufferPlace {
  int64_t slot = kOwnSlot;
  int64_t rows = 0, row = 0, stride = 1;
  int64_t head_begin = 0, head_end = 0;
  auto operator<=>(const BufferPlace&) const = default;
};

struct Transfer {
  int64_t step = 0;          // posted in this step
  int64_t needed_by = 0;     // complete before this step works with it; the number of steps = before the end
  int64_t src = 0, dst = 0;  // ranks; equal for a copy from slot to slot, which is not sent
  Payload payload = Payload::kK;
  int64_t owner =
      0;  // whose shard the rows belong to; kSeveral: all of the source's buffer, which holds several shards
  int64_t batch_begin = 0, batch_end = 0;
  int64_t head_begin = 0, head_end = 0;
  std::vector<RowRange> rows{};  // local rows of the owner; kSeveral: of the buffer
  BufferPlace from{}, to{};
  bool adds = false;  // gradients: to what lies there, instead of overwriting it

  int64_t num_rows() const {
    int64_t total = 0;
    for (const RowRange& range : rows) total += range.end - range.begin;
    return total;
  }
  int64_t num_elements(int64_t dim) const {
    return (batch_end - batch_begin) * (head_end - head_begin) * num_rows() * dim;
  }
  bool is_sent() const { return src != dst; }
  auto operator<=>(const Transfer&) const = default;
};

// Bytes of the message.
int64_t bytes_of(const Transfer& transfer, const Problem& problem);

}  // namespace ringspan
