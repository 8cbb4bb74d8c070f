// Masks by name: one table of what each is given. The command line reads masks by it, the binding the words that cross
// PyTorch's dispatcher (docs/decisions/call-description.md), where a mask is its place in the table.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ringspan/mask/mask_spec.h"

namespace ringspan {

// What a mask is made from, once it is read.
struct MaskArguments {
  int64_t q_len = 0, kv_len = 0;
  std::vector<int64_t> numbers{};
  std::vector<std::vector<int64_t>> rows{};  // of its table
  Corner corner = Corner::kTopLeft;
  DocumentRule inside{};
};

// The rows of a mask's table: none, a single one, or any number.
enum class MaskTable : uint8_t { kNone, kOneRow, kRows };

// Given in this order: numbers, table, corner, the mask inside documents.
struct MaskKind {
  std::string_view name;
  std::string_view numbers;  // in short, such as "L,R"; "" = none
  MaskTable table;
  std::string_view holds;  // what the table holds
  std::string_view row;    // a row of it, such as "LEN,..."
  int64_t columns;         // of the table; 0 = any number
  bool has_corner;         // where its diagonal starts must be said if q_len != kv_len
  bool has_inside;
  MaskSpec (*build)(const MaskArguments& arguments);

  int64_t num_numbers() const;
  // How it is written on the command line, such as "window:L,R".
  std::string usage() const;
};

// A mask's code is its place.
std::span<const MaskKind> mask_kinds();

// Masks that may stand inside documents come first in the table, in the order of DocumentRule::Kind.
inline constexpr int64_t kNumInsideKinds = 4;
// The numbers of a rule's mask.
std::vector<int64_t> numbers_of(const DocumentRule& rule);
DocumentRule rule_of(int64_t kind, std::span<const int64_t> numbers);

// "full", "window:5,0", "causal_bottom_right", "documents_window:5,0:3,5,8", "a&b" (docs: cli/options.h). Error naming
// what does not fit.
MaskSpec parse_mask(std::string_view text, int64_t q_len, int64_t kv_len);
// All usages, for messages and help.
std::string mask_help();

}  // namespace ringspan
