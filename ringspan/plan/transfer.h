// Transfer: one message between two ranks. Plain integers; whoever runs the plan decides how to post it.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace ringspan {

enum class Payload : uint8_t { kQ, kK, kV, kOut, kStats, kDout, kDelta, kDq, kDk, kDv };

const char* name_of(Payload payload);          // "q", "k", ... "dv"
Payload parse_payload(std::string_view name);  // the inverse

struct RowRange {
  int64_t begin = 0, end = 0;
  bool operator==(const RowRange&) const = default;
};

struct Transfer {
  int64_t step = 0;          // posted in this step
  int64_t src = 0, dst = 0;  // ranks
  Payload payload = Payload::kK;
  int64_t owner = 0;  // whose shard the rows belong to
  int64_t batch_begin = 0, batch_end = 0;
  int64_t head_begin = 0, head_end = 0;
  std::vector<RowRange> rows;  // local rows of the owner
  int64_t src_slot = 0;        // buffer it is read from at src, written to at dst
  int64_t dst_slot = 0;

  int64_t num_rows() const {
    int64_t total = 0;
    for (const RowRange& range : rows) total += range.end - range.begin;
    return total;
  }
  bool operator==(const Transfer&) const = default;
};

// Gradients of K/V travel in slots and in a type of their own.
inline bool is_kv_gradient(const Transfer& transfer) {
  return transfer.payload == Payload::kDk || transfer.payload == Payload::kDv;
}

}  // namespace ringspan
