#include "binding/group/agreement.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <unordered_map>
#include <utility>

#include <torch/csrc/autograd/graph_task.h>
#include <unistd.h>

#include "binding/base/content_hash.h"
#include "binding/base/errors.h"
#include "binding/group/debug.h"
#include "binding/group/live_call.h"
#include "binding/group/mailbox.h"
#include "binding/watch/bounded_wait.h"
#include "binding/watch/deadline.h"
#include "binding/watch/interpreter.h"
#include "binding/watch/patience.h"

namespace ringspan::binding {
namespace {

// A store answers within this time, or it is out of reach.
constexpr std::chrono::milliseconds kAnswer{1500};

// A store or a collective carries a text of any length, but not every one survives it.
std::string cut(const std::string& message) {
  if (message.size() <= Agreement::kMaxMessage) return message;
  return concat(message.substr(0, Agreement::kMaxMessage), " ... (", message.size(), " bytes)");
}

RowReading settled(RowReading reading) { return reading == RowReading::kEither ? RowReading::kByRows : reading; }

// A forked child shares the connections of its parent, and has none of its threads.
int64_t this_process() { return ::getpid(); }

// Another one for each thread; systems give the number of a thread that has ended again.
int64_t this_thread() {
  static std::atomic<int64_t> num_threads = 0;
  thread_local const int64_t number = ++num_threads;
  return number;
}

// Also of what is computed again: with activation checkpointing autograd calls forwards, from threads of its own.
bool is_in_backward(const Proposal& proposal) {
  return proposal.kind == CallKind::kBackward || proposal.is_in_backward ||
         torch::autograd::get_current_graph_task_id() >= 0;
}

struct Entry {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<Agreement> agreement;
};
struct Table {
  std::mutex mutex;
  std::unordered_map<c10d::ProcessGroup*, Entry> entries;
};

// Never destroyed: a group may outlive static objects.
Table& table() {
  static auto& table = *new Table;
  return table;
}

}  // namespace

std::shared_ptr<Agreement> Agreement::of(const Group& group) {
  const std::lock_guard lock(table().mutex);
  auto& entries = table().entries;
  const auto found = entries.find(group.process_group.get());
  if (found != entries.end() && !found->second.group.expired()) return found->second.agreement;
  std::erase_if(entries, [](const auto& item) { return item.second.group.expired(); });
  auto agreement = std::make_shared<Agreement>(group);
  entries.insert_or_assign(group.process_group.get(),
                           Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group.process_group), agreement});
  return agreement;
}

std::vector<std::shared_ptr<Agreement>> Agreement::all() {
  const std::lock_guard lock(table().mutex);
  std::vector<std::shared_ptr<Agreement>> agreements;
  for (const auto& [group, entry] : table().entries) agreements.push_back(entry.agreement);
  return agreements;
}

Agreement::Agreement(const Group& group)
    : name_(group.name),
      process_(this_process()),
      last_calls_(static_cast<size_t>(group.size), "none"),
      watch_(std::make_unique<Watch>(group, store_of(group))),
      mailbox_(make_mailbox(group, *watch_)) {}

Agreement::~Agreement() = default;

void Agreement::check_open() const {
  RINGSPAN_CHECK(process_ == this_process(), "group \"", name_, "\" made calls in process ", process_, ", of which ",
                 this_process(), " is a forked child; it shares the parent's connections, make a group of its own");
  if (closed_) {
    throw_peer_error(concat("group \"", name_, "\" is closed by an earlier failure: ", closed_->words,
                            ". Make a new process group"));
  }
}

void Agreement::check_thread(const Group& group, const Proposal& proposal) {
  if (is_in_backward(proposal)) return;
  std::string owner;
  {
    const std::lock_guard lock(mutex_);
    if (owner_ && owner_->thread == this_thread()) return;
    if (owner_) owner = owner_->name;
  }
  const std::string own = name_of_thread();
  if (owner.empty()) {
    const std::lock_guard lock(mutex_);
    if (!owner_) {
      owner_ = {this_thread(), own};
      return;
    }
    owner = owner_->name;
  }
  const std::string message =
      concat(own, " calls in group \"", name_, "\", whose calls are made by ", owner,
             "; threads come in another order on each rank. Call ringspan.hand_over(group) on all ranks in between, or "
             "give each thread a group of its own");
  leave(group, RefusalKind::kBadArgument, message);
  throw Error(message);
}

std::unique_lock<std::timed_mutex> Agreement::enter(const Group& group, const Proposal& proposal) {
  {
    const std::lock_guard lock(mutex_);
    check_open();
  }
  check_thread(group, proposal);
  std::unique_lock lock(in_call_, std::defer_lock);
  while (!lock.try_lock_for(kLook)) serve_interpreter("");
  const std::lock_guard state(mutex_);
  check_open();
  return lock;
}

std::vector<std::string> Agreement::swap_headers(const Group& group, int64_t number, const Proposal& proposal,
                                                 Patience& patience) {
  const Header header{.number = number,
                      .kind = proposal.kind,
                      .forward_number = proposal.forward_number,
                      .hash = proposal.hash,
                      .place = is_debugged() && !proposal.place.empty() ? hash_text(proposal.place) : 0,
                      .bias_content = proposal.bias_content,
                      .mask_content = proposal.mask_content,
                      .seed = proposal.seed,
                      .seed_is_drawn = proposal.seed_is_drawn,
                      .needs_grad = proposal.needs_grad,
                      .is_debugged = is_debugged(),
                      .bias_rows = proposal.bias_rows,
                      .mask_rows = proposal.mask_rows};
  Letter letter{number, Topic::kHeader, to_text(header, mailbox_->takes_long_texts() ? proposal.place : "")};
  return mailbox_->swap(group, letter, patience, awaited(group, number, patience));
}

Agreed Agreement::agree(const Group& group, const Proposal& proposal) {
  const std::chrono::milliseconds deadline = deadline_of(group);
  std::unique_lock lock = enter(group, proposal);
  int64_t number = 0;
  {
    const std::lock_guard state(mutex_);
    number = ++number_;
  }
  const int64_t entry = record_.begin({.number = number,
                                       .kind = to_words(proposal.kind, proposal.forward_number),
                                       .place = proposal.place,
                                       .signature = proposal.hash});
  Patience patience(*watch_, deadline, [&] {
    return concat("rank ", group.rank, " waits for ", absent_in_words(), " in call ", number, " of group \"", name_,
                  "\" (before step 0). ", last_calls());
  });
  try {
    const std::vector<std::string> texts = swap_headers(group, number, proposal, patience);
    check_versions(group.rank, texts);
    note_calls(texts);
    check_refusals(number, texts);
    Header shared = header_of(texts[group.rank]);
    bool same = true;
    for (const std::string& text : texts) {
      const Header other = header_of(text);
      same = same && agree_with(other, shared);
      join_known(shared, other);
    }
    if (!same) compare_in_words(group, number, proposal, patience);
    record_.agree(entry);
    return {header_of(texts[0]).seed, settled(shared.bias_rows), settled(shared.mask_rows),
            std::make_unique<LiveCall>(shared_from_this(), group, number, entry, std::move(lock))};
  } catch (const LostTexts& lost) {
    const std::string text =
        concat("rank ", group.rank, " lost its peers in call ", number, " (before step 0): ", lost.what(),
               ". The group is closed: make a new process group. ", last_calls());
    record_.end(entry, text);
    close({-1, text});
    throw_peer_error(text);
  } catch (const WaitInterrupted& interrupted) {
    const std::string text = concat("rank ", group.rank, " was interrupted in call ", number, " (before step 0)");
    record_.end(entry, text);
    close(watch_->report({group.rank, text}, kAnswer));
    std::rethrow_exception(interrupted.raised);
  } catch (const c10::DistBackendError& error) {
    record_.end(entry, message_of(error));
    write_flight_record();
    throw;
  } catch (const std::exception& error) {
    record_.end(entry, message_of(error));
    throw;
  }
}
// Every rank throws here: they see the same descriptions.
void Agreement::compare_in_words(const Group& group, int64_t number, const Proposal& proposal, Patience& patience) {
  std::vector<Fields> by_rank;
  const Letter letter{number, Topic::kDescription, to_text(all_fields(proposal))};
  const std::vector<std::string> texts = mailbox_->swap(group, letter, patience, awaited(group, number, patience));
  for (const std::string& text : texts) {
    // In the place of a description that will not come stands a header.
    if (text.size() >= sizeof(Header) && header_of(text).version == Version::own()) check_refusals(number, texts);
    by_rank.push_back(fields_of(text));
  }
  throw_difference(number, by_rank);
}

// What stands in the place of a text that will not come.
Awaited Agreement::awaited(const Group& group, int64_t number, const Patience& patience) {
  const auto failed = [number](const Failure& failure) {
    return to_text(Header{.number = number, .refusal = RefusalKind::kFailed}, concat(failure.rank, " ", failure.words));
  };
  const auto gone = [this, number, rank = group.rank, begin = std::chrono::steady_clock::now(),
                     limit = patience.deadline()](const std::vector<int64_t>& missing) {
    const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const bool is_over = std::chrono::duration<double>(limit).count() <= waited + 0.05;
    const std::string words =
        concat("rank ", rank, " waited for ", join_ranks(missing), " in call ", number, " (before step 0) for ",
               std::round(waited * 10) / 10, " s and ", is_over ? "gave up" : "was interrupted", ". ", last_calls());
    return to_text(Header{.number = number, .refusal = RefusalKind::kGaveUp}, words);
  };
  return {.text_of_failure = failed, .text_of_absence = gone};
}

// Raises what the first refusing rank has told.
void Agreement::check_refusals(int64_t number, const std::vector<std::string>& texts) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const RefusalKind refusal =
        texts[rank].size() < sizeof(Header) ? RefusalKind::kNone : header_of(texts[rank]).refusal;
    if (refusal == RefusalKind::kNone) continue;
    const std::string message = message_after_header(texts[rank]);
    if (refusal == RefusalKind::kGaveUp) throw_peer_error(message);
    if (refusal == RefusalKind::kFailed) {
      const size_t blank = message.find(' ');
      const Failure failure{std::atoll(message.c_str()), message.substr(blank + 1)};
      const std::string text =
          concat("lost peer ", failure.rank, " in call ", number, " (before step 0): ", failure.words,
                 ". The group is closed: make a new process group. ", last_calls());
      close(failure);
      throw_peer_error(text);
    }
    const std::string text = concat("rank ", rank, " refused call ", number, " of the group: ", message);
    if (refusal == RefusalKind::kUnsupported) throw Unsupported(text);
    throw Error(text);
  }
}

std::unique_ptr<LiveCall> Agreement::begin_unagreed(const Group& group, const Proposal& proposal) {
  (void)deadline_of(group);
  std::unique_lock lock = enter(group, proposal);
  const int64_t entry = record_.begin(
      {.kind = to_words(proposal.kind, proposal.forward_number), .place = proposal.place, .signature = proposal.hash});
  record_.agree(entry);
  return std::make_unique<LiveCall>(shared_from_this(), group, 0, entry, std::move(lock));
}

void Agreement::refuse_since(const Group& group, RefusalKind kind, const std::string& message, int64_t calls) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (number_ != calls || closed_ || process_ != this_process()) return;
  }
  leave(group, kind, message);
}

void Agreement::leave(const Group& group, RefusalKind kind, const std::string& message) noexcept {
  try {
    int64_t number = 0;
    {
      const std::lock_guard lock(mutex_);
      number = ++number_;
    }
    record_.end(record_.begin({.number = number, .kind = "refused"}), message);
    mailbox_->leave(group, {number, Topic::kHeader, to_text(Header{.number = number, .refusal = kind}, cut(message))});
  } catch (const std::exception&) {
    // The caller raises its own error now, and that one matters more than a lost peer.
  }
}

int64_t Agreement::calls() const {
  const std::lock_guard lock(mutex_);
  return number_;
}

void Agreement::hand_over() {
  const std::lock_guard lock(mutex_);
  owner_.reset();
}

void Agreement::end_call() {
  watch_->move_to({});
  mailbox_->end_call();
}

void Agreement::close(const Failure& failure) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = failure;
  }
  watch_->peers().close();
  write_flight_record();
}

void Agreement::note_calls(const std::vector<std::string>& texts) {
  const std::lock_guard lock(mutex_);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const Header header = header_of(texts[rank]);
    if (header.refusal != RefusalKind::kNone) continue;
    last_calls_[rank] = to_words(header, message_after_header(texts[rank]));
  }
}

std::string Agreement::last_calls() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<std::string, std::vector<int64_t>>> groups;
  for (size_t rank = 0; rank < last_calls_.size(); ++rank) {
    auto same =
        std::find_if(groups.begin(), groups.end(), [&](const auto& one) { return one.first == last_calls_[rank]; });
    if (same == groups.end()) same = groups.insert(groups.end(), {last_calls_[rank], {}});
    same->second.push_back(static_cast<int64_t>(rank));
  }
  std::string text = "Last calls that all ranks agreed on: ";
  for (size_t i = 0; i < groups.size(); ++i) {
    text += concat(i ? ", " : "", groups[i].first, " on ", join_ranks(groups[i].second));
  }
  return text;
}

std::string Agreement::absent_in_words() const {
  std::vector<int64_t> missing = watch_->overview().missing;
  if (missing.empty()) missing = watch_->not_joined();
  return missing.empty() ? "its peers" : join_ranks(missing);
}

}  // namespace ringspan::binding
