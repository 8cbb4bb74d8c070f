#include "ringspan/plan/transfer.h"

#include "ringspan/base/error.h"

namespace ringspan {

const char* name_of(Payload payload) {
  switch (payload) {
    case Payload::kQ: return "q";
    case Payload::kK: return "k";
    case Payload::kV: return "v";
    case Payload::kOut: return "out";
    case Payload::kStats: return "stats";
    case Payload::kDout: return "dout";
    case Payload::kDelta: return "delta";
    case Payload::kDq: return "dq";
    case Payload::kDk: return "dk";
    case Payload::kDv: return "dv";
  }
  throw Error(concat("payload ", static_cast<int>(payload), " is unknown"));
}

Payload parse_payload(std::string_view name) {
  for (int value = 0; value <= static_cast<int>(Payload::kDv); ++value) {
    if (name == name_of(static_cast<Payload>(value))) return static_cast<Payload>(value);
  }
  throw Error(concat("payload \"", name, "\" is unknown"));
}

}  // namespace ringspan
