// Proposal: what a rank is about to do, and what it says where the ranks differ.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "binding/group/signature.h"

namespace ringspan::binding {

// How a tensor of pairs lies along the query rows, as bits: what this rank's tensor may be. A rank with a single row
// cannot tell; all ranks together settle it.
enum class RowReading : uint8_t { kNone = 0, kShared = 1, kByRows = 2, kEither = 3 };

enum class CallKind : int64_t { kForward, kBackward, kOther };

// What a rank is about to do.
struct Proposal {
  CallKind kind = CallKind::kForward;
  bool is_in_backward = false;  // of another kind than kBackward: made by autograd
  int64_t forward_number = 0;   // backward: the number that its forward got
  bool needs_grad = false;      // forward: a backward will follow
  uint64_t hash = 0;            // of all that must be the same on every rank
  std::string place{};          // where the program made the call; "" unknown
  // Where calls are debugged, a hash of the tensor if it has one row for all queries; 0 unknown.
  uint64_t bias_content = 0, mask_content = 0;
  // How tensors of pairs lie along the rows: those of all ranks together settle it.
  RowReading bias_rows = RowReading::kNone, mask_rows = RowReading::kNone;
  int64_t seed = 0;                    // of dropout; 0 without
  bool seed_is_drawn = false;          // nobody chose it: the one of rank 0 is taken
  std::function<Fields()> describe{};  // the same in words; called where the ranks differ
};

// "forward", "backward of call 3", "other"
std::string to_words(CallKind kind, int64_t forward_number);

// All that is compared, in words.
Fields all_fields(const Proposal& proposal);
std::string to_text(const Fields& fields);
Fields fields_of(const std::string& text);
// Error that names each field that differs, its values and the ranks.
[[noreturn]] void throw_difference(int64_t number, const std::vector<Fields>& by_rank);

// "rank 1", "ranks 0, 2"
std::string join_ranks(const std::vector<int64_t>& ranks);

}  // namespace ringspan::binding
