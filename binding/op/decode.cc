#include "binding/op/decode.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "ringspan/base/error.h"

#include "binding/base/content_hash.h"

namespace ringspan::binding {
namespace {

constexpr int64_t kVersion = 1;
constexpr size_t kMapBegin = 5, kMaskBegin = 9;

enum MapKind : int64_t { kContiguous, kHeadTail, kStriped, kLengths, kSegments };
enum MaskCode : int64_t {
  kFull,
  kCausal,
  kWindow,
  kChunked,
  kPrefix,
  kDocumentLengths,
  kDocumentIds,
  kBands,
  kAnd,
  kOr
};

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

const Table& table_at(const Description& description, int64_t index, const char* what, size_t dims) {
  const auto count = static_cast<int64_t>(description.tables.size());
  RINGSPAN_CHECK(0 <= index && index < count, "spec: ", what, " are in table ", index, ", and ", count,
                 " tables were given");
  const Table& table = description.tables[static_cast<size_t>(index)];
  RINGSPAN_CHECK(table.size.size() == dims, "table ", index, " (", what, ") has ", table.size.size(),
                 " dimensions; it must have ", dims);
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

const Table& table_of_columns(const Description& description, int64_t index, const char* what, int64_t columns) {
  const Table& table = table_at(description, index, what, 2);
  RINGSPAN_CHECK(table.size[1] == columns, "table ", index, " (", what, ") has ", table.size[1],
                 " columns; it must have ", columns);
  return table;
}

Corner read_corner(Reader& reader) {
  const int64_t corner = reader.next("corner");
  RINGSPAN_CHECK(corner == 1 || corner == 2, "spec: corner is ", corner,
                 "; it must be 1 (top-left) or 2 (bottom-right)");
  return corner == 1 ? Corner::kTopLeft : Corner::kBottomRight;
}

DocumentRule read_rule(Reader& reader) {
  const int64_t kind = reader.next("inside kind");
  RINGSPAN_CHECK(0 <= kind && kind <= 3, "spec: the mask inside documents is ", kind, "; it must be 0..3");
  DocumentRule rule;
  rule.kind = static_cast<DocumentRule::Kind>(kind);
  rule.left = reader.next("left");
  rule.right = reader.next("right");
  rule.size = reader.next("size");
  return rule;
}

ShardMap segments_map(const Description& description, int64_t index, int64_t seq_len, int64_t world) {
  const Table& rows = table_of_columns(description, index, "segments", 6);
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

ShardMap decode_map(const Description& description, size_t begin, int64_t seq_len, int64_t world) {
  const int64_t kind = description.spec[begin], table = description.spec[begin + 1];
  switch (kind) {
    case kContiguous: return ShardMap::contiguous(seq_len, world);
    case kHeadTail: return ShardMap::head_tail(seq_len, world);
    case kStriped: return ShardMap::striped(seq_len, world);
    case kLengths: {
      const Table& lengths = table_at(description, table, "shard lengths", 1);
      RINGSPAN_CHECK(lengths.size[0] == world, "shard lengths: ", lengths.size[0], " were given for ", world, " ranks");
      return ShardMap::from_lengths({lengths.data, lengths.data + world});
    }
    case kSegments: return segments_map(description, table, seq_len, world);
    default: throw Error(concat("spec: shard map kind ", kind, " is unknown"));
  }
}

void check_square(const SpecSizes& sizes, const char* what, int64_t columns) {
  RINGSPAN_CHECK(sizes.q_len == sizes.kv_len, what, ": the query has ", sizes.q_len, " positions and key/value ",
                 sizes.kv_len, "; document masks need the same sequence on both sides");
  RINGSPAN_CHECK(columns < 0 || columns == sizes.q_len, what, ": ", columns, " were given for a sequence of ",
                 sizes.q_len, " positions");
}

MaskSpec decode_bands(const Description& description, Reader& reader, const SpecSizes& sizes) {
  const Table& table = table_of_columns(description, reader.next("table"), "bands", 6);
  std::vector<Band> bands;
  for (int64_t i = 0; i < table.size[0]; ++i) {
    const int64_t* row = table.data + i * 6;
    bands.push_back(
        {.q_begin = row[0], .q_end = row[1], .kv_begin = row[2], .kv_end = row[3], .lo = row[4], .hi = row[5]});
  }
  return MaskSpec(sizes.q_len, sizes.kv_len, {std::move(bands)});
}

// One mask of the program, without the operators.
MaskSpec decode_leaf(const Description& description, Reader& reader, int64_t code, const SpecSizes& sizes) {
  switch (code) {
    case kFull: return MaskSpec::full(sizes.q_len, sizes.kv_len);
    case kCausal: return MaskSpec::causal(sizes.q_len, sizes.kv_len, read_corner(reader));
    case kWindow: {
      const int64_t left = reader.next("left"), right = reader.next("right");
      return MaskSpec::window(sizes.q_len, sizes.kv_len, left, right, read_corner(reader));
    }
    case kChunked: {
      const int64_t size = reader.next("size");
      return MaskSpec::chunked(sizes.q_len, sizes.kv_len, size, read_corner(reader));
    }
    case kPrefix: {
      const Table& table = table_at(description, reader.next("table"), "prefix lengths", 1);
      const std::vector<int64_t> prefix(table.data, table.data + table.size[0]);
      return MaskSpec::prefix(sizes.q_len, sizes.kv_len, prefix, read_corner(reader));
    }
    case kDocumentLengths: {
      const Table& table = table_at(description, reader.next("table"), "document lengths", 2);
      check_square(sizes, "document lengths", -1);
      return documents_by_lengths(sizes.q_len, rows_of(table), read_rule(reader));
    }
    case kDocumentIds: {
      const Table& table = table_at(description, reader.next("table"), "document ids", 2);
      check_square(sizes, "document ids", table.size[1]);
      return documents_by_ids(rows_of(table), read_rule(reader));
    }
    case kBands: return decode_bands(description, reader, sizes);
    default: throw Error(concat("spec: mask code ", code, " is unknown"));
  }
}

// Runs the postfix program; `leaf` reads the operands of a mask, `join` combines two values.
template <class Value, class Leaf, class Join>
Value run_program(std::span<const int64_t> program, Leaf&& leaf, Join&& join) {
  Reader reader(program);
  std::vector<Value> stack;
  while (!reader.at_end()) {
    const int64_t code = reader.next("mask code");
    if (code != kAnd && code != kOr) {
      stack.push_back(leaf(reader, code));
      continue;
    }
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
  const int64_t kind = description.spec[begin], table = description.spec[begin + 1];
  switch (kind) {
    case kContiguous: return "contiguous";
    case kHeadTail: return "head_tail";
    case kStriped: return "striped";
    case kLengths: return "lengths " + text_of_table(description, table);
    case kSegments:
      return concat("segments ", text_of_table(description, table), ", local rows ",
                    text_of_table(description, table + 1));
    default: return concat("kind ", kind);
  }
}

std::string text_of_inside(Reader& reader) {
  const int64_t kind = reader.next("inside kind"), left = reader.next("left"), right = reader.next("right"),
                size = reader.next("size");
  switch (kind) {
    case 0: return "full";
    case 1: return "causal";
    case 2: return concat("window(", left, ", ", right, ")");
    default: return concat("chunked(", size, ")");
  }
}

std::string text_of_corner(Reader& reader) { return reader.next("corner") == 1 ? "top_left" : "bottom_right"; }

std::string text_of_leaf(const Description& description, Reader& reader, int64_t code) {
  const auto table = [&] { return text_of_table(description, reader.next("table")); };
  switch (code) {
    case kFull: return "full()";
    case kCausal: return concat("causal(", text_of_corner(reader), ")");
    case kWindow: {
      const int64_t left = reader.next("left"), right = reader.next("right");
      return concat("window(", left, ", ", right, ", ", text_of_corner(reader), ")");
    }
    case kChunked: {
      const int64_t size = reader.next("size");
      return concat("chunked(", size, ", ", text_of_corner(reader), ")");
    }
    case kPrefix: {
      const std::string lengths = table();
      return concat("prefix(", lengths, ", ", text_of_corner(reader), ")");
    }
    case kDocumentLengths:
    case kDocumentIds: {
      const std::string content = table();
      return concat("documents(", code == kDocumentIds ? "ids " : "lengths ", content, ", inside ",
                    text_of_inside(reader), ")");
    }
    case kBands: return concat("bands(", table(), ")");
    default: throw Error(concat("spec: mask code ", code, " is unknown"));
  }
}

}  // namespace

int64_t Table::num_elements() const {
  return std::accumulate(size.begin(), size.end(), int64_t{1}, std::multiplies<>());
}

SpecSizes read_sizes(std::span<const int64_t> spec) {
  RINGSPAN_CHECK(spec.size() > kMaskBegin, "spec: it has ", spec.size(), " values; a call has more than ", kMaskBegin);
  RINGSPAN_CHECK(spec[0] == kVersion, "spec: its version is ", spec[0], "; this library reads version ", kVersion);
  RINGSPAN_CHECK(spec[1] >= 1, "world is ", spec[1], "; it must be at least 1");
  return {.world = spec[1], .batch = spec[2], .q_len = spec[3], .kv_len = spec[4]};
}

Decoded decode(const Description& description) {
  const SpecSizes sizes = read_sizes(description.spec);
  MaskSpec mask = *run_program<std::optional<MaskSpec>>(
      description.spec.subspan(kMaskBegin),
      [&](Reader& reader, int64_t code) { return std::optional(decode_leaf(description, reader, code, sizes)); },
      [](int64_t code, const std::optional<MaskSpec>& left, const std::optional<MaskSpec>& right) {
        return std::optional(code == kAnd ? *left & *right : *left | *right);
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
      [&](Reader& reader, int64_t code) { return text_of_leaf(description, reader, code); },
      [](int64_t code, const std::string& left, const std::string& right) {
        return concat("(", left, code == kAnd ? " & " : " | ", right, ")");
      });
  return {.mask = std::move(mask),
          .q_map = text_of_map(description, kMapBegin),
          .kv_map = text_of_map(description, kMapBegin + 2)};
}

}  // namespace ringspan::binding
