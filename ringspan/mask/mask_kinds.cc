#include "ringspan/mask/mask_kinds.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "ringspan/base/error.h"
#include "ringspan/base/words.h"

namespace ringspan {
namespace {

MaskSpec build_full(const MaskArguments& a) { return MaskSpec::full(a.q_len, a.kv_len); }

MaskSpec build_causal(const MaskArguments& a) { return MaskSpec::causal(a.q_len, a.kv_len, a.corner); }

MaskSpec build_window(const MaskArguments& a) {
  return MaskSpec::window(a.q_len, a.kv_len, a.numbers[0], a.numbers[1], a.corner);
}

MaskSpec build_chunked(const MaskArguments& a) { return MaskSpec::chunked(a.q_len, a.kv_len, a.numbers[0], a.corner); }

MaskSpec build_prefix(const MaskArguments& a) { return MaskSpec::prefix(a.q_len, a.kv_len, a.rows[0], a.corner); }

void check_square(const MaskArguments& a) {
  RINGSPAN_CHECK(a.q_len == a.kv_len, "documents: the query has ", a.q_len, " positions and key/value ", a.kv_len,
                 "; document masks need the same sequence on both sides");
}

MaskSpec build_documents(const MaskArguments& a) {
  check_square(a);
  return documents_by_lengths(a.q_len, a.rows, a.inside);
}

MaskSpec build_document_ids(const MaskArguments& a) {
  check_square(a);
  for (const std::vector<int64_t>& ids : a.rows) {
    RINGSPAN_CHECK(static_cast<int64_t>(ids.size()) == a.q_len, "document ids: ", ids.size(),
                   " were given for a sequence of ", a.q_len, " positions");
  }
  return documents_by_ids(a.rows, a.inside);
}

MaskSpec build_bands(const MaskArguments& a) {
  std::vector<Band> bands;
  for (const std::vector<int64_t>& row : a.rows) {
    bands.push_back(
        {.q_begin = row[0], .q_end = row[1], .kv_begin = row[2], .kv_end = row[3], .lo = row[4], .hi = row[5]});
  }
  return MaskSpec(a.q_len, a.kv_len, {std::move(bands)});
}

constexpr MaskKind kMasks[] = {
    // name, numbers, table: rows, what it holds, a row, columns; has_corner, has_inside, build
    {"full", "", MaskTable::kNone, "", "", 0, false, false, build_full},
    {"causal", "", MaskTable::kNone, "", "", 0, true, false, build_causal},
    {"window", "L,R", MaskTable::kNone, "", "", 0, true, false, build_window},
    {"chunked", "N", MaskTable::kNone, "", "", 0, true, false, build_chunked},
    {"prefix", "", MaskTable::kOneRow, "prefix lengths", "P,...", 0, true, false, build_prefix},
    {"documents", "", MaskTable::kRows, "document lengths", "LEN,...", 0, false, true, build_documents},
    {"document_ids", "", MaskTable::kRows, "document ids", "ID,...", 0, false, true, build_document_ids},
    {"bands", "", MaskTable::kRows, "bands", "Q0,Q1,K0,K1,LO,HI/...", 6, false, false, build_bands},
};

// name_with_corner_or_inside:arguments:more
class MaskText {
 public:
  explicit MaskText(std::string_view text) : whole_(text), arguments_(split(text, ':')), name_(arguments_[0]) {
    for (const auto& [ending, corner] :
         {std::pair("_top_left", Corner::kTopLeft), std::pair("_bottom_right", Corner::kBottomRight)}) {
      if (!name_.ends_with(ending)) continue;
      name_.resize(name_.size() - std::string_view(ending).size());
      corner_ = corner;
    }
  }

  MaskSpec build(int64_t q_len, int64_t kv_len) {
    const MaskKind& kind = find();
    MaskArguments arguments{.q_len = q_len, .kv_len = kv_len};
    if (kind.has_inside) arguments.inside = rule_of(inside_code_, take_numbers(kMasks[inside_code_]));
    arguments.numbers = take_numbers(kind);
    if (kind.table != MaskTable::kNone) arguments.rows = lists_of(take(), whole_);
    RINGSPAN_CHECK(next_ == arguments_.size(), "mask \"", whole_, "\" has ", arguments_.size() - 1, " arguments, not ",
                   next_ - 1, "; write it as ", usage_);
    check_rows(kind, arguments.rows);
    check_corner(kind, q_len, kv_len);
    arguments.corner = corner_.value_or(Corner::kTopLeft);
    return kind.build(arguments);
  }

 private:
  // By its name, or by that and the name of the mask inside.
  const MaskKind& find() {
    for (const MaskKind& kind : kMasks) {
      if (kind.name == name_) {
        usage_ = kind.usage();
        return kind;
      }
      for (int64_t inside = 0; kind.has_inside && inside < kNumInsideKinds; ++inside) {
        if (concat(kind.name, "_", kMasks[inside].name) != name_) continue;
        inside_code_ = inside;
        const std::string_view numbers = kMasks[inside].numbers;
        usage_ = concat(name_, numbers.empty() ? "" : ":", numbers, ":", kind.row);
        return kind;
      }
    }
    throw Error(concat("mask \"", whole_, "\" is unknown; use ", mask_help()));
  }

  std::string_view take() {
    RINGSPAN_CHECK(next_ < arguments_.size(), "mask \"", whole_, "\" has ", arguments_.size() - 1,
                   " arguments, not enough; write it as ", usage_);
    return arguments_[next_++];
  }

  std::vector<int64_t> take_numbers(const MaskKind& kind) {
    const auto count = static_cast<size_t>(kind.num_numbers());
    if (count == 0) return {};
    std::vector<int64_t> numbers = ringspan::numbers_of(take(), whole_);
    RINGSPAN_CHECK(numbers.size() == count, "mask \"", whole_, "\" gives ", numbers.size(), " numbers, not ", count,
                   "; write it as ", usage_);
    return numbers;
  }

  void check_rows(const MaskKind& kind, const std::vector<std::vector<int64_t>>& rows) const {
    RINGSPAN_CHECK(kind.table != MaskTable::kOneRow || rows.size() == 1, "mask \"", whole_, "\" gives ", rows.size(),
                   " lists, not 1; write it as ", usage_);
    for (const std::vector<int64_t>& row : rows) {
      RINGSPAN_CHECK(kind.columns == 0 || static_cast<int64_t>(row.size()) == kind.columns, "mask \"", whole_,
                     "\" gives ", row.size(), " numbers, not ", kind.columns, "; write it as ", usage_);
    }
  }

  void check_corner(const MaskKind& kind, int64_t q_len, int64_t kv_len) const {
    RINGSPAN_CHECK(kind.has_corner || !corner_, "mask \"", whole_, "\": ", kind.name, " has no corner");
    RINGSPAN_CHECK(!kind.has_corner || corner_ || q_len == kv_len, "mask \"", whole_, "\" over ", q_len,
                   " queries and ", kv_len, " keys could start in two corners; write ", name_, "_top_left or ", name_,
                   "_bottom_right");
  }

  std::string whole_;
  std::vector<std::string> arguments_;
  std::string name_, usage_;
  std::optional<Corner> corner_;
  int64_t inside_code_ = static_cast<int64_t>(DocumentRule::Kind::kCausal);
  size_t next_ = 1;
};

}  // namespace

int64_t MaskKind::num_numbers() const {
  return numbers.empty() ? 0 : 1 + std::count(numbers.begin(), numbers.end(), ',');
}

std::string MaskKind::usage() const {
  return concat(name, numbers.empty() ? "" : ":", numbers, row.empty() ? "" : ":", row);
}

std::span<const MaskKind> mask_kinds() { return kMasks; }

std::vector<int64_t> numbers_of(const DocumentRule& rule) {
  switch (rule.kind) {
    case DocumentRule::Kind::kWindow: return {rule.left, rule.right};
    case DocumentRule::Kind::kChunked: return {rule.size};
    default: return {};
  }
}

DocumentRule rule_of(int64_t kind, std::span<const int64_t> numbers) {
  DocumentRule rule{.kind = static_cast<DocumentRule::Kind>(kind)};
  if (rule.kind == DocumentRule::Kind::kWindow) {
    rule.left = numbers[0];
    rule.right = numbers[1];
  }
  if (rule.kind == DocumentRule::Kind::kChunked) rule.size = numbers[0];
  return rule;
}

MaskSpec parse_mask(std::string_view text, int64_t q_len, int64_t kv_len) {
  std::optional<MaskSpec> mask;
  for (const std::string& part : split(text, '&')) {
    const MaskSpec next = MaskText(part).build(q_len, kv_len);
    mask = mask ? *mask & next : next;
  }
  return *mask;
}

std::string mask_help() {
  std::vector<std::string> usages;
  for (const MaskKind& kind : kMasks) usages.push_back(kind.usage());
  return any_of(usages);
}

}  // namespace ringspan
