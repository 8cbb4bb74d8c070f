#include "binding/group/agreement.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "binding/base/errors.h"
#include "binding/group/mailbox.h"

namespace ringspan::binding {
namespace {

using Topic = Mailbox::Topic;

// Changes with the header and with what a proposal's hash is made of.
constexpr int64_t kProtocol = 2;
constexpr uint64_t kMagic = 0x676e697270617073;  // "ringspan" as bytes would read backwards
constexpr size_t kVersionBytes = 16;

// Fixed size; a refusal's message follows it. What tells versions apart comes first and keeps its place for ever.
struct Header {
  uint64_t magic = kMagic;
  int64_t protocol = kProtocol;
  std::array<char, kVersionBytes> version{RINGSPAN_VERSION};

  int64_t number = 0;
  RefusalKind refusal = RefusalKind::kNone;
  CallKind kind = CallKind::kForward;
  int64_t forward_number = 0;
  uint64_t hash = 0;
  int64_t seed = 0;
  bool seed_is_drawn = false, needs_grad = false;
  RowReading bias_rows = RowReading::kNone, mask_rows = RowReading::kNone;
  int32_t unused = 0;

  bool operator==(const Header&) const = default;
};
// With its length it fits into the one frame of a group without a store (mailbox.cc).
static_assert(sizeof(Header) <= 120 && std::has_unique_object_representations_v<Header>);

// What the readings of all ranks have in common; kNone where none is left.
RowReading common(RowReading a, RowReading b) {
  return static_cast<RowReading>(static_cast<uint8_t>(a) & static_cast<uint8_t>(b));
}

bool agree_with(Header a, Header b) {
  if (a.seed_is_drawn && b.seed_is_drawn) a.seed = b.seed;
  for (const auto rows : {&Header::bias_rows, &Header::mask_rows}) {
    if (common(a.*rows, b.*rows) != RowReading::kNone) a.*rows = b.*rows;
  }
  return a == b;
}

std::string to_text(const Header& header, const std::string& message = "") {
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + message;
}

Header header_of(const std::string& text) {
  Header header;
  std::memcpy(&header, text.data(), std::min(sizeof header, text.size()));
  return header;
}

// Before anything else in a header is believed.
void check_versions(int64_t own_rank, const std::vector<std::string>& texts) {
  const Header mine;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const Header theirs = header_of(texts[rank]);
    const bool is_known = texts[rank].size() >= sizeof(Header) && theirs.magic == kMagic;
    if (is_known && theirs.protocol == mine.protocol && theirs.version == mine.version) continue;
    const std::string version(theirs.version.data(), strnlen(theirs.version.data(), kVersionBytes));
    throw Error(concat("rank ", own_rank, " runs ringspan " RINGSPAN_VERSION " (protocol ", kProtocol, ") and rank ",
                       rank,
                       is_known ? concat(" ringspan ", version, " (protocol ", theirs.protocol, ")")
                                : std::string(" another version or program"),
                       "; install one version on every rank"));
  }
}

constexpr char kEnd = '\0';

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

[[noreturn]] void throw_difference(int64_t number, const std::vector<Fields>& by_rank) {
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

// A store or a collective carries a text of any length, but not every one survives it.
std::string cut(const std::string& message) {
  if (message.size() <= Agreement::kMaxMessage) return message;
  return concat(message.substr(0, Agreement::kMaxMessage), " ... (", message.size(), " bytes)");
}

RowReading settled(RowReading reading) { return reading == RowReading::kEither ? RowReading::kByRows : reading; }

// Raises what the first refusing rank has told.
void check_refusals(int64_t number, const std::vector<std::string>& texts) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const RefusalKind refusal = header_of(texts[rank]).refusal;
    if (refusal == RefusalKind::kNone) continue;
    const std::string message = texts[rank].substr(sizeof(Header));
    if (refusal == RefusalKind::kGaveUp) {
      throw_peer_error(concat("rank ", rank, " gave up on call ", number, " before this rank came to it: ", message));
    }
    const std::string text = concat("rank ", rank, " refused call ", number, " of the group: ", message);
    if (refusal == RefusalKind::kUnsupported) throw Unsupported(text);
    throw Error(text);
  }
}

// Of the ranks that did not come.
std::string absence(const Group& group, int64_t number, const AbsentRanks& absent) {
  const std::string who = absent.ranks.empty() ? "a rank of the group or its store" : join_ranks(absent.ranks);
  return concat("rank ", group.rank, " waited for ", who, " in call ", number,
                " (before step 0, transfer: header) for ", group.timeout().count() / 1000.0,
                " s at most: ", absent.what());
}

}  // namespace

std::shared_ptr<Agreement> Agreement::of(const Group& group) {
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
    std::shared_ptr<Agreement> agreement;
  };
  static std::mutex mutex;
  // Never destroyed: a group may outlive static objects.
  static auto& entries = *new std::unordered_map<c10d::ProcessGroup*, Entry>();
  const std::lock_guard lock(mutex);
  const auto found = entries.find(group.process_group.get());
  if (found != entries.end() && !found->second.group.expired()) return found->second.agreement;
  std::erase_if(entries, [](const auto& item) { return item.second.group.expired(); });
  auto agreement = std::make_shared<Agreement>(make_mailbox(group));
  entries.insert_or_assign(group.process_group.get(),
                           Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group.process_group), agreement});
  return agreement;
}

Agreement::Agreement(std::unique_ptr<Mailbox> mailbox) : mailbox_(std::move(mailbox)) {}

Agreement::~Agreement() = default;

Agreed Agreement::agree(const Group& group, const Proposal& proposal) {
  const std::lock_guard lock(mutex_);
  const int64_t number = ++number_;
  const Header header{.number = number,
                      .kind = proposal.kind,
                      .forward_number = proposal.forward_number,
                      .hash = proposal.hash,
                      .seed = proposal.seed,
                      .seed_is_drawn = proposal.seed_is_drawn,
                      .needs_grad = proposal.needs_grad,
                      .bias_rows = proposal.bias_rows,
                      .mask_rows = proposal.mask_rows};
  try {
    const std::vector<std::string> texts = mailbox_->swap(group, number, Topic::kHeader, to_text(header));
    check_versions(group.rank, texts);
    check_refusals(number, texts);
    Header shared = header;
    bool same = true;
    for (const std::string& text : texts) {
      const Header other = header_of(text);
      same = same && agree_with(other, shared);
      shared.bias_rows = common(shared.bias_rows, other.bias_rows);
      shared.mask_rows = common(shared.mask_rows, other.mask_rows);
    }
    if (same) return {number, header_of(texts[0]).seed, settled(shared.bias_rows), settled(shared.mask_rows)};
    std::vector<Fields> by_rank;
    for (const std::string& text : mailbox_->swap(group, number, Topic::kDescription, to_text(all_fields(proposal)))) {
      by_rank.push_back(fields_of(text));
    }
    throw_difference(number, by_rank);
  } catch (const AbsentRanks& absent) {
    const std::string message = absence(group, number, absent);
    // A rank that comes later must not believe that this one is still there.
    const Header gone{.number = number, .refusal = RefusalKind::kGaveUp};
    mailbox_->replace(group, number, Topic::kHeader, to_text(gone, message));
    throw_peer_error(message);
  }
}

void Agreement::refuse_since(const Group& group, RefusalKind kind, const std::string& message, int64_t calls) noexcept {
  const std::lock_guard lock(mutex_);
  if (number_ != calls) return;
  const int64_t number = ++number_;
  try {
    mailbox_->leave(group, number, Topic::kHeader, to_text(Header{.number = number, .refusal = kind}, cut(message)));
  } catch (const std::exception&) {
    // The caller raises its own error now, and that one matters more than a lost peer.
  }
}

int64_t Agreement::calls() const {
  const std::lock_guard lock(mutex_);
  return number_;
}

}  // namespace ringspan::binding
