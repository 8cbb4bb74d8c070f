#include "ringspan/plan/transfer.h"

#include <array>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

constexpr std::array<const char*, kNumPayloads> kNames{"q",     "k",    "v",    "out", "max", "sum", "lse",  "dout",
                                                       "delta", "bias", "mask", "dq",  "dk",  "dv",  "dbias"};

}  // namespace

const char* name_of(Payload payload) {
  const auto index = static_cast<size_t>(payload);
  RINGSPAN_CHECK(index < kNames.size(), "payload ", index, " is unknown");
  return kNames[index];
}

Payload parse_payload(std::string_view name) {
  for (size_t index = 0; index < kNames.size(); ++index) {
    if (name == kNames[index]) return static_cast<Payload>(index);
  }
  throw Error(concat("payload \"", name, "\" is unknown"));
}

PayloadSize size_of(Payload payload, const Problem& p) {
  const int64_t element = size_of(p.dtype), accumulator = size_of(accumulator_of(p.dtype));
  switch (payload) {
    case Payload::kQ: return {p.batch, p.q_heads, p.qk_dim, element};
    case Payload::kK: return {p.batch, p.kv_heads, p.qk_dim, element};
    case Payload::kV: return {p.batch, p.kv_heads, p.v_dim, element};
    case Payload::kOut:
    case Payload::kDout: return {p.batch, p.q_heads, p.v_dim, element};
    case Payload::kMax:
    case Payload::kSum:
    case Payload::kLse:
    case Payload::kDelta: return {p.batch, p.q_heads, 1, accumulator};
    case Payload::kBias: return {p.bias.batch, p.bias.heads, p.kv_len, p.bias.element_bytes};
    case Payload::kMask: return {p.mask.batch, p.mask.heads, p.kv_len, p.mask.element_bytes};
    case Payload::kDq: return {p.batch, p.q_heads, p.qk_dim, accumulator};
    case Payload::kDk: return {p.batch, p.kv_heads, p.qk_dim, accumulator};
    case Payload::kDv: return {p.batch, p.kv_heads, p.v_dim, accumulator};
    case Payload::kDbias: return {p.bias.batch, p.bias.heads, p.kv_len, accumulator};
  }
  throw Error(concat("payload ", static_cast<int>(payload), " is unknown"));
}

int64_t bytes_of(const Transfer& transfer, const Problem& problem) {
  const PayloadSize size = size_of(transfer.payload, problem);
  return transfer.num_elements(size.dim) * size.element_bytes;
}

}  // namespace ringspan
