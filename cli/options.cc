#include "cli/options.h"

#include <charconv>
#include <string_view>
#include <vector>

#include "ringspan/base/error.h"
#include "ringspan/shard/named_map.h"

namespace ringspan::cli {
namespace {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(separator, begin);
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

// "3,5,8" as numbers; an empty text is an empty list.
std::vector<int64_t> numbers_of(const std::string& text, const std::string& whole) {
  std::vector<int64_t> numbers;
  if (text.empty()) return numbers;
  for (const std::string& part : split(text, ',')) {
    int64_t number = 0;
    const auto [end, fault] = std::from_chars(part.data(), part.data() + part.size(), number);
    RINGSPAN_CHECK(fault == std::errc() && end == part.data() + part.size(), "\"", part, "\" in \"", whole,
                   "\" is not a whole number");
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<std::vector<int64_t>> lists_of(const std::string& text, const std::string& whole) {
  std::vector<std::vector<int64_t>> lists;
  for (const std::string& part : split(text, '/')) lists.push_back(numbers_of(part, whole));
  return lists;
}

// name_with_corner:arguments:more
struct MaskWords {
  std::string whole, name;
  std::optional<Corner> corner;
  std::vector<std::string> arguments;

  explicit MaskWords(const std::string& text) : whole(text), arguments(split(text, ':')) {
    name = arguments[0];
    arguments.erase(arguments.begin());
    for (const auto& [ending, value] :
         {std::pair("_top_left", Corner::kTopLeft), std::pair("_bottom_right", Corner::kBottomRight)}) {
      if (!name.ends_with(ending)) continue;
      name.resize(name.size() - std::string_view(ending).size());
      corner = value;
    }
  }

  void expect_arguments(size_t count, const char* example) const {
    RINGSPAN_CHECK(arguments.size() == count, "mask \"", whole, "\" has ", arguments.size(), " arguments, not ", count,
                   "; write it as ", example);
  }

  std::vector<int64_t> numbers(size_t argument, size_t count, const char* example) const {
    std::vector<int64_t> result = numbers_of(arguments[argument], whole);
    RINGSPAN_CHECK(result.size() == count, "mask \"", whole, "\" gives ", result.size(), " numbers, not ", count,
                   "; write it as ", example);
    return result;
  }
};

MaskSpec parse_documents(const MaskWords& words, int64_t q_len, int64_t kv_len) {
  RINGSPAN_CHECK(q_len == kv_len && !words.corner, "mask \"", words.whole,
                 "\": packed documents need as many queries as keys (", q_len, " and ", kv_len, ") and no corner");
  DocumentRule inside;
  size_t count = 1;
  const char* example = "documents:3,5,8 or documents_full:3,5,8";
  if (words.name == "documents_full") {
    inside.kind = DocumentRule::Kind::kFull;
  } else if (words.name == "documents_window") {
    inside.kind = DocumentRule::Kind::kWindow;
    example = "documents_window:L,R:3,5,8";
    count = 2;
  } else if (words.name == "documents_chunked") {
    inside.kind = DocumentRule::Kind::kChunked;
    example = "documents_chunked:N:3,5,8";
    count = 2;
  }
  words.expect_arguments(count, example);
  if (inside.kind == DocumentRule::Kind::kWindow) {
    const std::vector<int64_t> sides = words.numbers(0, 2, example);
    inside.left = sides[0];
    inside.right = sides[1];
  }
  if (inside.kind == DocumentRule::Kind::kChunked) inside.size = words.numbers(0, 1, example)[0];
  return documents_by_lengths(q_len, lists_of(words.arguments.back(), words.whole), inside);
}

MaskSpec parse_one_mask(const std::string& text, int64_t q_len, int64_t kv_len) {
  const MaskWords words(text);
  if (words.name.starts_with("documents")) {
    for (const char* name : {"documents", "documents_full", "documents_window", "documents_chunked"}) {
      if (words.name == name) return parse_documents(words, q_len, kv_len);
    }
  }
  if (words.name == "full") {
    words.expect_arguments(0, "full");
    return MaskSpec::full(q_len, kv_len);
  }
  const bool needs_corner = q_len != kv_len && !words.corner;
  const Corner corner = words.corner.value_or(Corner::kTopLeft);
  const auto check_corner = [&] {
    RINGSPAN_CHECK(!needs_corner, "mask \"", text, "\" over ", q_len, " queries and ", kv_len,
                   " keys could start in two corners; write ", words.name, "_top_left or ", words.name,
                   "_bottom_right");
  };
  if (words.name == "causal") {
    words.expect_arguments(0, "causal");
    check_corner();
    return MaskSpec::causal(q_len, kv_len, corner);
  }
  if (words.name == "window") {
    words.expect_arguments(1, "window:L,R");
    check_corner();
    const std::vector<int64_t> sides = words.numbers(0, 2, "window:L,R");
    return MaskSpec::window(q_len, kv_len, sides[0], sides[1], corner);
  }
  if (words.name == "chunked") {
    words.expect_arguments(1, "chunked:N");
    check_corner();
    return MaskSpec::chunked(q_len, kv_len, words.numbers(0, 1, "chunked:N")[0], corner);
  }
  if (words.name == "prefix") {
    words.expect_arguments(1, "prefix:P or prefix:P0,P1 (one per batch entry)");
    check_corner();
    return MaskSpec::prefix(q_len, kv_len, numbers_of(words.arguments[0], text), corner);
  }
  throw Error(concat("mask \"", text, "\" is unknown; use full, causal, window:L,R, chunked:N, prefix:P or ",
                     "documents:LEN,..."));
}

// Another word for the same map.
std::string without_zigzag(const std::string& shard) { return shard == "zigzag" ? "head_tail" : shard; }

GradRoute parse_route(const std::string& name) {
  if (name == "from_owner") return GradRoute::kFromOwner;
  if (name == "from_next") return GradRoute::kFromNext;
  throw Error(concat("grad route \"", name, "\" is unknown; use from_owner or from_next"));
}

}  // namespace

MaskSpec parse_mask(const std::string& text, int64_t q_len, int64_t kv_len) {
  std::optional<MaskSpec> mask;
  for (const std::string& part : split(text, '&')) {
    const MaskSpec next = parse_one_mask(part, q_len, kv_len);
    mask = mask ? *mask & next : next;
  }
  return *mask;
}

ShardMap parse_shard(const std::string& text, const MaskSpec& mask, int64_t seq_len, int64_t world) {
  if (const std::optional<ShardMap> named = shard_map_named(text, mask, seq_len, world)) return *named;
  constexpr std::string_view kDocuments = "per_document:", kLengths = "lengths:";
  if (text.starts_with(kDocuments)) {
    return ShardMap::per_document(numbers_of(text.substr(kDocuments.size()), text), world, seq_len);
  }
  RINGSPAN_CHECK(
      text.starts_with(kLengths), "shard \"", text,
      "\" is unknown; use contiguous, head_tail, striped, balanced, per_document:LEN,... or lengths:LEN,...");
  const ShardMap map = ShardMap::from_lengths(numbers_of(text.substr(kLengths.size()), text));
  RINGSPAN_CHECK(map.world() == world, "shard \"", text, "\" is for ", map.world(), " ranks and the world has ", world,
                 "; give one length per rank");
  RINGSPAN_CHECK(map.seq_len() == seq_len, "shard \"", text, "\" adds up to ", map.seq_len(),
                 " positions and the sequence has ", seq_len, "; change one of them");
  return map;
}

void QuestionOptions::add_to(CLI::App& verb) {
  verb.add_option("--world", world_, "Ranks")->capture_default_str();
  verb.add_option("--seq-len", seq_len_, "Tokens of the whole query sequence")->required();
  verb.add_option("--kv-len", kv_len_, "Tokens of the whole key/value sequence [as --seq-len]");
  verb.add_option("--batch", batch_, "Batch entries")->capture_default_str();
  verb.add_option("--heads", heads_, "Query heads")->capture_default_str();
  verb.add_option("--kv-heads", kv_heads_, "Key/value heads [as --heads]");
  verb.add_option("--head-dim", head_dim_, "Head dim of q and k")->capture_default_str();
  verb.add_option("--v-head-dim", v_head_dim_, "Head dim of v and out [as --head-dim]");
  verb.add_option("--dtype", dtype_, "fp32, bf16, fp16 or fp64")->capture_default_str();
  verb.add_option("--layout", layout_, "BNSD, BSND, BSH or SBH")->capture_default_str();
  verb.add_option("--scale", scale_, "Of the scores [1/sqrt(head dim)]");
  verb.add_option("--mask", mask_, "full, causal, window:L,R, chunked:N, prefix:P,..., documents:LEN,...")
      ->capture_default_str();
  verb.add_option("--shard", shard_,
                  "contiguous, head_tail (or zigzag), striped, balanced, per_document:LEN,... or lengths:LEN,...")
      ->transform(without_zigzag)
      ->capture_default_str();
  verb.add_option("--kv-shard", kv_shard_, "The same for keys and values [as --shard]")->transform(without_zigzag);
  verb.add_option("--schedule", schedule_,
                  "ring, gather, ulysses, hybrid:N (N ranks split heads), pruned, q_ring, invariant or double_ring:N "
                  "(N ranks a node)")
      ->capture_default_str();
  verb.add_option("--grad-route", grad_route_, "from_next or from_owner")->capture_default_str();
}

Question QuestionOptions::question_with(const std::string& shard, const std::string& schedule) const {
  Problem problem{.batch = batch_,
                  .q_heads = heads_,
                  .kv_heads = kv_heads_.value_or(heads_),
                  .q_len = seq_len_,
                  .kv_len = kv_len_.value_or(seq_len_),
                  .qk_dim = head_dim_,
                  .v_dim = v_head_dim_.value_or(head_dim_),
                  .dtype = parse_dtype(dtype_),
                  .layout = parse_layout(layout_)};
  problem.scale = scale_.value_or(head_dim_ > 0 ? default_scale(head_dim_) : 0.0);
  problem.check();
  const MaskSpec mask = parse_mask(mask_, problem.q_len, problem.kv_len);
  return {.problem = problem,
          .mask = mask,
          .q_map = parse_shard(shard, mask, problem.q_len, world_),
          .kv_map = parse_shard(kv_shard_.value_or(shard), mask, problem.kv_len, world_),
          .schedule = parse_schedule(schedule),
          .grad_route = parse_route(grad_route_)};
}

}  // namespace ringspan::cli
