#include "binding/group/proposal.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "ringspan/base/error.h"

#include "binding/group/debug.h"

namespace ringspan::binding {
namespace {

constexpr char kEnd = '\0';

// "q_len is 16 (8 local rows) on rank 0, 12 (6 local rows) on rank 1", or "" where all that have it agree.
std::string difference(const std::string& name, const std::vector<Fields>& by_rank) {
  std::map<std::string, std::vector<int64_t>> ranks_by_text;
  std::vector<std::string> order;
  std::set<std::string> values;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto& fields = by_rank[rank];
    const auto field = std::find_if(fields.begin(), fields.end(), [&](const Field& one) { return one.name == name; });
    if (field == fields.end()) continue;
    values.insert(field->value);
    const std::string text = field->note.empty() ? field->value : field->value + " (" + field->note + ")";
    if (ranks_by_text[text].empty()) order.push_back(text);
    ranks_by_text[text].push_back(static_cast<int64_t>(rank));
  }
  if (values.size() < 2) return "";
  std::string sentence = name + " is ";
  for (size_t i = 0; i < order.size(); ++i) {
    sentence += concat(i ? ", " : "", order[i], " on ", join_ranks(ranks_by_text[order[i]]));
  }
  return sentence;
}

// Every name once, in the order in which the ranks have them.
std::vector<std::string> names_of(const std::vector<Fields>& by_rank) {
  std::vector<std::string> names;
  std::set<std::string> known;
  for (const Fields& fields : by_rank) {
    for (const Field& field : fields) {
      if (known.insert(field.name).second) names.push_back(field.name);
    }
  }
  return names;
}

}  // namespace

std::string to_words(CallKind kind, int64_t forward_number) {
  switch (kind) {
    case CallKind::kForward: return "forward";
    case CallKind::kBackward: return concat("backward of call ", forward_number);
    case CallKind::kOther: break;
  }
  return "other";
}

// name, value, note, each ended by a byte that no argument contains.
std::string to_text(const Fields& fields) {
  std::string text;
  for (const Field& field : fields) {
    for (const std::string* part : {&field.name, &field.value, &field.note}) text += *part + kEnd;
  }
  return text;
}

Fields fields_of(const std::string& text) {
  std::vector<std::string> parts(1);
  for (char letter : text) {
    if (letter == kEnd) {
      parts.emplace_back();
    } else {
      parts.back() += letter;
    }
  }
  Fields fields;
  for (size_t i = 0; i + 2 < parts.size(); i += 3) {
    fields.push_back({parts[i], parts[i + 1], parts[i + 2]});
  }
  return fields;
}

std::string join_ranks(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += concat(i ? ", " : "", ranks[i]);
  return text;
}

Fields all_fields(const Proposal& proposal) {
  Fields fields = proposal.describe();
  fields.push_back({"RINGSPAN_DEBUG", is_debugged() ? "1" : "0"});
  if (is_debugged() && !proposal.place.empty()) fields.push_back({"place of the call", proposal.place});
  for (const auto& [name, content] :
       {std::pair("bias", proposal.bias_content), std::pair("attn_mask", proposal.mask_content)}) {
    if (content == 0) continue;
    fields.push_back({concat("content of ", name, ", one row for all queries,"), concat("of hash ", content)});
  }
  if (proposal.kind == CallKind::kOther) return fields;
  const bool backward = proposal.kind == CallKind::kBackward;
  fields.insert(fields.begin(),
                {{"call", backward ? concat("the backward of call ", proposal.forward_number) : "a forward", ""},
                 {"needs_grad", proposal.needs_grad ? "true" : "false", ""},
                 {"seed", proposal.seed_is_drawn ? "drawn" : concat(proposal.seed), ""}});
  for (const auto& [name, rows] :
       {std::pair("rows of bias", proposal.bias_rows), std::pair("rows of attn_mask", proposal.mask_rows)}) {
    // Who cannot tell has nothing to say.
    if (rows == RowReading::kShared) fields.push_back({name, "one for all queries"});
    if (rows == RowReading::kByRows) fields.push_back({name, "one for each query"});
  }
  return fields;
}

void throw_difference(int64_t number, const std::vector<Fields>& by_rank) {
  // Where the calls themselves differ, their arguments say nothing.
  std::string sentences = difference("call", by_rank);
  if (sentences.empty()) {
    for (const std::string& name : names_of(by_rank)) {
      const std::string sentence = difference(name, by_rank);
      if (!sentence.empty()) sentences += (sentences.empty() ? "" : "; ") + sentence;
    }
  }
  throw Error(concat("the ranks of the group disagree about call ", number, ": ", sentences,
                     ". Every rank must make the same calls in the same order with the same global arguments"));
}

}  // namespace ringspan::binding
