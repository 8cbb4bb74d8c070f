#include "binding/op/decode.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "ringspan/base/error.h"
#include "ringspan/base/words.h"
#include "ringspan/mask/mask_kinds.h"
#include "ringspan/shard/map_kinds.h"

#include "binding/base/content_hash.h"

namespace ringspan::binding {
namespace {

constexpr size_t kMapBegin = 5, kMaskBegin = 9;

// Reads operands one after the other.
class Reader {
 public:
  explicit Reader(std::span<const int64_t> words) : words_(words) {}

  bool at_end() const { return position_ == words_.size(); }
  int64_t next(const char* what) {
    RINGSPAN_CHECK(!at_end(), "spec: it ends where the ", what, " should follow (", words_.size(), " values)");
    return words_[position_++];
  }

 private:
  std::span<const int64_t> words_;
  size_t position_ = 0;
};

// `columns` 0: any number.
const Table& table_at(const Description& description, int64_t index, std::string_view what, size_t dims,
                      int64_t columns = 0) {
  const auto count = static_cast<int64_t>(description.tables.size());
  RINGSPAN_CHECK(0 <= index && index < count, "spec: ", what, " are in table ", index, ", and ", count,
                 " tables were given");
  const Table& table = description.tables[static_cast<size_t>(index)];
  RINGSPAN_CHECK(table.size.size() == dims, "table ", index, " (", what, ") has ", table.size.size(),
                 " dimensions; it must have ", dims);
  RINGSPAN_CHECK(columns == 0 || table.size[1] == columns, "table ", index, " (", what, ") has ", table.size[1],
                 " columns; it must have ", columns);
  return table;
}

std::vector<std::vector<int64_t>> rows_of(const Table& table) {
  std::vector<std::vector<int64_t>> rows;
  for (int64_t row = 0; row < table.size[0]; ++row) {
    const int64_t* begin = table.data + row * table.size[1];
    rows.emplace_back(begin, begin + table.size[1]);
  }
  return rows;
}

// Of a mask inside documents three numbers are always there: left and right of a window, the size of a chunk.
DocumentRule read_rule(Reader& reader) {
  const int64_t kind = reader.next("inside kind");
  RINGSPAN_CHECK(0 <= kind && kind < kNumInsideKinds, "spec: the mask inside documents is ", kind, "; it must be 0..",
                 kNumInsideKinds - 1);
  DocumentRule rule{.kind = static_cast<DocumentRule::Kind>(kind)};
  rule.left = reader.next("left");
  rule.right = reader.next("right");
  rule.size = reader.next("size");
  return rule;
}

ShardMap segments_map(const Description& description, int64_t index, int64_t seq_len, int64_t world) {
  const Table& rows = table_at(description, index, "segments", 2, 6);
  const Table& local = table_at(description, index + 1, "local rows", 1);
  RINGSPAN_CHECK(local.size[0] == world, "table ", index + 1, " (local rows) has ", local.size[0],
                 " entries and the shard map ", world, " ranks");
  int64_t num_lists = 1;
  for (int64_t i = 0; i < rows.size[0]; ++i) {
    const int64_t* row = rows.data + i * 6;
    RINGSPAN_CHECK(0 <= row[0] && row[0] <= rows.size[0] && 0 <= row[1] && row[1] < world, "segment ", i,
                   " is of batch entry ", row[0], ", rank ", row[1], "; the shard map has ", world, " ranks");
    num_lists = std::max(num_lists, row[0] + 1);
  }
  std::vector<std::vector<std::vector<Segment>>> segments(num_lists, std::vector<std::vector<Segment>>(world));
  for (int64_t i = 0; i < rows.size[0]; ++i) {
    const int64_t* row = rows.data + i * 6;
    segments[row[0]][row[1]].push_back({.local_row = row[2], .begin = row[3], .length = row[4], .stride = row[5]});
  }
  return ShardMap::from_segments(seq_len, std::move(segments), {local.data, local.data + world});
}

// A map of one of the codes.
const MapKind& map_kind_of(int64_t code) {
  RINGSPAN_CHECK(0 <= code && code < kNumMapCodes, "spec: shard map kind ", code, " is unknown");
  return map_kinds()[static_cast<size_t>(code)];
}

ShardMap decode_map(const Description& description, size_t begin, int64_t seq_len, int64_t world) {
  const int64_t code = description.spec[begin], index = description.spec[begin + 1];
  const MapKind& kind = map_kind_of(code);
  if (code == kSegmentsMap) return segments_map(description, index, seq_len, world);
  MapArguments arguments{.seq_len = seq_len, .world = world};
  if (!kind.lengths.empty()) {
    const Table& lengths = table_at(description, index, "shard lengths", 1);
    arguments.lengths.assign(lengths.data, lengths.data + lengths.size[0]);
  }
  return kind.build(arguments);
}

// What a mask was given, in the order of MaskKind.
struct MaskOperands {
  std::vector<int64_t> numbers{};
  int64_t table = -1;  // its index
  int64_t corner = 0;
  DocumentRule inside{};
};

MaskOperands read_operands(Reader& reader, const MaskKind& kind) {
  MaskOperands operands;
  for (int64_t i = 0; i < kind.num_numbers(); ++i) operands.numbers.push_back(reader.next("number of a mask"));
  if (kind.table != MaskTable::kNone) operands.table = reader.next("table");
  if (kind.has_corner) {
    operands.corner = reader.next("corner");
    RINGSPAN_CHECK(operands.corner == 1 || operands.corner == 2, "spec: corner is ", operands.corner,
                   "; it must be 1 (top-left) or 2 (bottom-right)");
  }
  if (kind.has_inside) operands.inside = read_rule(reader);
  return operands;
}

// One mask of the program, without the operators.
MaskSpec decode_leaf(const Description& description, Reader& reader, const MaskKind& kind, const SpecSizes& sizes) {
  MaskOperands operands = read_operands(reader, kind);
  MaskArguments arguments{.q_len = sizes.q_len, .kv_len = sizes.kv_len, .numbers = std::move(operands.numbers)};
  if (kind.table == MaskTable::kOneRow) {
    const Table& table = table_at(description, operands.table, kind.holds, 1);
    arguments.rows = {{table.data, table.data + table.size[0]}};
  } else if (kind.table == MaskTable::kRows) {
    arguments.rows = rows_of(table_at(description, operands.table, kind.holds, 2, kind.columns));
  }
  arguments.corner = operands.corner == 2 ? Corner::kBottomRight : Corner::kTopLeft;
  arguments.inside = operands.inside;
  return kind.build(arguments);
}

int64_t num_masks() { return static_cast<int64_t>(mask_kinds().size()); }
// Operators follow the masks: what both keep, what either keeps.
int64_t and_code() { return num_masks(); }

// Runs the postfix program; `leaf` reads the operands of a mask, `join` combines two values.
template <class Value, class Leaf, class Join>
Value run_program(std::span<const int64_t> program, Leaf&& leaf, Join&& join) {
  Reader reader(program);
  std::vector<Value> stack;
  while (!reader.at_end()) {
    const int64_t code = reader.next("mask code");
    if (0 <= code && code < num_masks()) {
      stack.push_back(leaf(reader, mask_kinds()[static_cast<size_t>(code)]));
      continue;
    }
    RINGSPAN_CHECK(code == and_code() || code == and_code() + 1, "spec: mask code ", code, " is unknown");
    RINGSPAN_CHECK(stack.size() >= 2, "spec: a mask operator has ", stack.size(), " operands; it needs 2");
    Value right = std::move(stack.back());
    stack.pop_back();
    stack.back() = join(code, stack.back(), right);
  }
  RINGSPAN_CHECK(stack.size() == 1, "spec: the mask program leaves ", stack.size(), " masks; it must leave 1");
  return std::move(stack.back());
}

std::string text_of(const Table& table) {
  constexpr int64_t kShown = 12;
  std::string text;
  for (size_t axis = 1; axis < table.size.size(); ++axis)
    text += concat(axis > 1 ? " x " : "rows of ", table.size[axis], " ");
  text += "[";
  for (int64_t i = 0; i < std::min(table.num_elements(), kShown); ++i) text += concat(i ? " " : "", table.data[i]);
  if (table.num_elements() > kShown) {
    const auto size = static_cast<size_t>(table.num_elements());
    text += concat(" ... ", size, " values, hash ", hash_words({table.data, size}));
  }
  return text + "]";
}

std::string text_of_table(const Description& description, int64_t index) {
  const bool known = 0 <= index && index < static_cast<int64_t>(description.tables.size());
  return known ? text_of(description.tables[static_cast<size_t>(index)]) : concat("table ", index);
}

std::string text_of_map(const Description& description, size_t begin) {
  const int64_t code = description.spec[begin], table = description.spec[begin + 1];
  const std::string_view name = map_kind_of(code).name;
  if (code == kLengthsMap) return concat(name, " ", text_of_table(description, table));
  if (code != kSegmentsMap) return std::string(name);
  return concat(name, " ", text_of_table(description, table), ", local rows ", text_of_table(description, table + 1));
}

std::string text_of_numbers(std::span<const int64_t> numbers) {
  std::vector<std::string> parts;
  for (const int64_t number : numbers) parts.push_back(concat(number));
  return joined(parts, ", ");
}

std::string text_of_rule(const DocumentRule& rule) {
  const std::string_view name = mask_kinds()[static_cast<size_t>(rule.kind)].name;
  const std::vector<int64_t> numbers = numbers_of(rule);
  return numbers.empty() ? std::string(name) : concat(name, "(", text_of_numbers(numbers), ")");
}

std::string text_of_leaf(const Description& description, Reader& reader, const MaskKind& kind) {
  const MaskOperands operands = read_operands(reader, kind);
  std::vector<std::string> parts;
  if (!operands.numbers.empty()) parts.push_back(text_of_numbers(operands.numbers));
  if (kind.table != MaskTable::kNone) parts.push_back(text_of_table(description, operands.table));
  if (kind.has_corner) parts.emplace_back(operands.corner == 1 ? "top_left" : "bottom_right");
  if (kind.has_inside) parts.push_back("inside " + text_of_rule(operands.inside));
  return concat(kind.name, "(", joined(parts, ", "), ")");
}

}  // namespace

int64_t Table::num_elements() const {
  return std::accumulate(size.begin(), size.end(), int64_t{1}, std::multiplies<>());
}

SpecSizes read_sizes(std::span<const int64_t> spec) {
  RINGSPAN_CHECK(spec.size() > kMaskBegin, "spec: it has ", spec.size(), " values; a call has more than ", kMaskBegin);
  RINGSPAN_CHECK(spec[0] == kSpecVersion, "spec: its version is ", spec[0], "; this library reads version ",
                 kSpecVersion);
  RINGSPAN_CHECK(spec[1] >= 1, "world is ", spec[1], "; it must be at least 1");
  return {.world = spec[1], .batch = spec[2], .q_len = spec[3], .kv_len = spec[4]};
}

Decoded decode(const Description& description) {
  const SpecSizes sizes = read_sizes(description.spec);
  MaskSpec mask = *run_program<std::optional<MaskSpec>>(
      description.spec.subspan(kMaskBegin),
      [&](Reader& reader, const MaskKind& kind) {
        return std::optional(decode_leaf(description, reader, kind, sizes));
      },
      [](int64_t code, const std::optional<MaskSpec>& left, const std::optional<MaskSpec>& right) {
        return std::optional(code == and_code() ? *left & *right : *left | *right);
      });
  return {.world = sizes.world,
          .batch = sizes.batch,
          .q_len = sizes.q_len,
          .kv_len = sizes.kv_len,
          .mask = std::move(mask),
          .q_map = decode_map(description, kMapBegin, sizes.q_len, sizes.world),
          .kv_map = decode_map(description, kMapBegin + 2, sizes.kv_len, sizes.world)};
}

DescriptionText describe(const Description& description) {
  read_sizes(description.spec);
  std::string mask = run_program<std::string>(
      description.spec.subspan(kMaskBegin),
      [&](Reader& reader, const MaskKind& kind) { return text_of_leaf(description, reader, kind); },
      [](int64_t code, const std::string& left, const std::string& right) {
        return concat("(", left, code == and_code() ? " & " : " | ", right, ")");
      });
  return {.mask = std::move(mask),
          .q_map = text_of_map(description, kMapBegin),
          .kv_map = text_of_map(description, kMapBegin + 2)};
}

}  // namespace ringspan::binding
