#include "binding/watch/watch.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <c10/util/Logging.h>

#include "binding/base/content_hash.h"
#include "binding/base/errors.h"
#include "binding/watch/connections.h"
#include "binding/watch/version.h"

namespace ringspan::binding {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// How often the store is asked.
constexpr Milliseconds kIdle = 500ms, kEager = 20ms, kPatient = 100ms;
constexpr Clock::duration kEagerFor = 1s;  // a wait that lasts longer is looked at less often
constexpr Milliseconds kFirstJoin = 1ms, kLastJoin = 20ms;
// A call that lasts longer tells how far it is.
constexpr Clock::duration kLong = 500ms;
// How often it is asked how far the others are and whose texts are missing: some keys per rank, from every rank that
// waits. It is also how much later than its deadline a rank may give up.
constexpr Milliseconds kAskPerRank = 30ms, kAskLeast = 100ms, kAskMost = 1s;
// A rank that can be watched in no other way says something every kBeat, and is lost when it is silent for kSilence.
constexpr Clock::duration kBeat = 2s, kSilence = 10s;

using Bytes = std::vector<uint8_t>;
Bytes bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

// What a rank says when it joins; the numbers that it has read of the others follow, 0 where it has read none.
struct Entry {
  Version version{};
  uint64_t number = 0;
  Process process{};
};

std::string to_text(const Entry& entry, const std::vector<uint64_t>& read) {
  std::string text(reinterpret_cast<const char*>(&entry), sizeof entry);
  return text.append(reinterpret_cast<const char*>(read.data()), read.size() * sizeof(uint64_t));
}

uint64_t draw_number() {
  std::random_device device;
  const uint64_t drawn = (static_cast<uint64_t>(device()) << 32) | device();
  return drawn == 0 ? 1 : drawn;
}

// "rank words": the words may hold anything.
std::string to_text(const Failure& failure) { return concat(failure.rank, " ", failure.words); }
Failure failure_of(const std::string& text) {
  const size_t blank = text.find(' ');
  Failure failure;
  if (blank != std::string::npos) failure = {std::atoll(text.c_str()), text.substr(blank + 1)};
  return failure;
}

}  // namespace

struct Watch::State {
  State(const Group& group, c10::intrusive_ptr<c10d::Store> store_or_null)
      : rank(group.rank),
        size(group.size),
        group(group.process_group),
        has_store(store_or_null != nullptr),
        peers(group),
        shared(std::move(store_or_null)),
        entry{.number = draw_number(), .process = Process::current()},
        read(static_cast<size_t>(group.size), 0),
        is_mutual(static_cast<size_t>(group.size), false),
        positions(static_cast<size_t>(group.size)),
        heard(static_cast<size_t>(group.size)) {
    entry.version = Version::own();
    is_mutual[rank] = true;
    read[rank] = entry.number;
  }

  const int64_t rank, size;
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  const bool has_store;
  Peers peers;

  // Of the lane alone.
  c10::intrusive_ptr<c10d::Store> shared;   // the group's, until there is a connection
  c10::intrusive_ptr<c10d::Store> joining;  // with the group's prefix, until all have joined
  c10::intrusive_ptr<c10d::Store> store;    // from then on, until it fails
  Entry entry;
  std::vector<uint64_t> read;
  bool is_published = false;
  Milliseconds join_pause = kFirstJoin;
  std::shared_ptr<const Awaited> filled;  // where the missing texts are in place
  Position published;
  int64_t beats = 0;
  Clock::time_point told{}, asked{};
  const Milliseconds ask_pause = std::clamp(kAskPerRank * size, kAskLeast, kAskMost);
  struct Heard {
    std::string text;
    Clock::time_point at{};
  };

  std::promise<Joined> joined_promise;
  const std::shared_future<Joined> joined_future = joined_promise.get_future().share();

  // Of all threads.
  mutable std::mutex mutex;
  std::vector<bool> is_mutual;  // has read our number, and we its
  std::string prefix;           // "" until all have joined
  bool is_over = false;         // no prefix will come
  std::optional<Failure> failure;
  std::shared_ptr<const Awaited> awaited;
  int64_t num_waiting = 0;
  bool asks_at_once = false;
  Clock::time_point waiting_since{};
  c10::intrusive_ptr<c10d::Work> receive;
  Clock::time_point receive_since{};
  Position own;
  Clock::time_point call_since{}, own_since{};
  std::vector<std::optional<Position>> positions;
  std::vector<Heard> heard;
  std::vector<int64_t> missing;
  Clock::time_point moved{};
  std::vector<std::pair<std::string, std::string>> to_leave;  // under these keys, once all have joined

  std::optional<Milliseconds> tick();
  void join();
  void finish_joining();
  void stop_joining(const std::exception_ptr& reason);
  void call_off_receive();
  void tell_position();
  void look_around();
  void look_for_the_lost(const std::shared_ptr<const Awaited>& wanted);
  void read_positions();
  bool is_missing(const Awaited& wanted, int64_t of_rank);
  std::vector<int64_t> missing_of(const Awaited& wanted);
  void fill_missing(const Awaited& wanted, const std::string& text);
  Failure report(const Failure& mine);
  void set_failure(const Failure& first);
};

std::optional<Milliseconds> Watch::State::tick() {
  if (group.expired()) {
    stop_joining(std::make_exception_ptr(std::runtime_error("the group was destroyed")));
    shared = joining = store = nullptr;
    peers.release();
    return std::nullopt;
  }
  try {
    call_off_receive();
    // Here, because it may take as long as anything that is asked of the store.
    if (const auto group_store = std::exchange(shared, nullptr)) joining = group_store->clone();
    if (joining) join();
    if (store) {
      tell_position();
      look_around();
    }
  } catch (const std::exception& error) {
    // The store is gone. Whoever waits for it finds that himself.
    if (store) forget_connection(store);
    store = joining = nullptr;
    stop_joining(std::current_exception());
  }
  const std::lock_guard lock(mutex);
  if (joining) return join_pause = std::min(join_pause * 2, kLastJoin);
  if (num_waiting > 0) return Clock::now() - waiting_since < kEagerFor ? kEager : kPatient;
  return kIdle;
}

void Watch::State::stop_joining(const std::exception_ptr& reason) {
  const std::lock_guard lock(mutex);
  if (!prefix.empty() || is_over) return;
  is_over = true;
  joined_promise.set_exception(reason);
}

// Until each rank has read the number that we drew now. Who has done so wrote what we read after that, so what it says
// of itself is of now as well.
void Watch::State::join() {
  const auto key_of = [](int64_t of_rank) { return concat("ringspan/join/", of_rank); };
  bool has_news = !is_published;
  for (int64_t other = 0; other < size; ++other) {
    if (is_mutual[other] || !joining->check({key_of(other)})) continue;
    const Bytes bytes = joining->get(key_of(other));
    Entry theirs;
    std::memcpy(&theirs, bytes.data(), std::min(bytes.size(), sizeof theirs));
    check_version(rank, other, theirs.version);
    const size_t numbers = (bytes.size() - sizeof theirs) / sizeof(uint64_t);
    if (numbers != static_cast<size_t>(size)) continue;  // of another group
    if (read[other] != theirs.number) {
      read[other] = theirs.number;
      has_news = true;
    }
    uint64_t ours = 0;
    std::memcpy(&ours, bytes.data() + sizeof theirs + rank * sizeof ours, sizeof ours);
    if (ours != entry.number) continue;
    peers.know(other, theirs.process);
    const std::lock_guard lock(mutex);
    is_mutual[other] = true;
  }
  if (has_news) joining->set(key_of(rank), bytes_of(to_text(entry, read)));
  is_published = true;
  if (std::all_of(is_mutual.begin(), is_mutual.end(), [](bool mutual) { return mutual; })) {
    finish_joining();
    return;
  }
  // There is no key yet under which it could be told: each rank sees it by itself.
  const std::vector<int64_t> gone = peers.lost();
  if (!gone.empty() && !failure) {
    set_failure({gone.front(), concat("rank ", gone.front(), " ", describe(peers.fate(gone.front())),
                                      " before all ranks of the group had made a call")});
  }
}

void Watch::State::finish_joining() {
  uint64_t all = 0;
  for (const uint64_t number : read) all = mix(all ^ number);
  store = common_connection(joining);
  std::vector<std::pair<std::string, std::string>> leaves;
  {
    const std::lock_guard lock(mutex);
    prefix = concat("ringspan/", all, "/");
    leaves.swap(to_leave);
  }
  for (const auto& [key, text] : leaves) set_first(*store, prefix + key, text);
  auto connection = std::make_shared<c10::intrusive_ptr<c10d::Store>>(without_prefix(std::exchange(joining, nullptr)));
  joined_promise.set_value({prefix, std::move(connection)});
}

void Watch::State::call_off_receive() {
  const std::lock_guard lock(mutex);
  if (receive && Clock::now() - receive_since > kEager) receive->abort();
}

void Watch::State::tell_position() {
  Position now_at;
  bool is_long = false;
  Clock::time_point since;
  {
    const std::lock_guard lock(mutex);
    now_at = own;
    since = own_since;
    is_long = own.number > 0 && Clock::now() - call_since > kLong;
  }
  bool beats_too = false;
  for (int64_t other = 0; other < size && !beats_too; ++other) beats_too = other != rank && !peers.is_watched(other);
  const bool has_moved = is_long && now_at != published;
  if (!has_moved && !(beats_too && Clock::now() - told > kBeat)) return;
  published = now_at;
  told = Clock::now();
  // Clocks differ between hosts, times do not.
  const auto age = std::chrono::duration_cast<Milliseconds>(told - since).count();
  store->set(concat(prefix, "at/", rank), bytes_of(concat(now_at.number, " ", now_at.step, " ", now_at.count, " ",
                                                          now_at.waits, " ", age, " ", ++beats)));
}

void Watch::State::look_around() {
  std::shared_ptr<const Awaited> wanted;
  bool asks = Clock::now() - asked > ask_pause;
  {
    const std::lock_guard lock(mutex);
    if (num_waiting == 0) return;
    asks = std::exchange(asks_at_once, false) || asks;
    wanted = awaited;
    if (failure && (!wanted || wanted == filled)) return;
  }
  const std::string failed = concat(prefix, "failed");
  if (!failure && store->check({failed})) set_failure(failure_of(text_of(store->get(failed))));
  if (asks) {
    asked = Clock::now();
    read_positions();
    if (wanted) {
      auto now_missing = missing_of(*wanted);
      const std::lock_guard lock(mutex);
      if (now_missing != missing) moved = Clock::now();
      missing = std::move(now_missing);
    }
  }
  if (!failure) look_for_the_lost(wanted);
  if (!failure || !wanted || wanted == filled) return;
  fill_missing(*wanted, wanted->text_of_failure(*failure));
  filled = wanted;
}

// A rank that is gone matters where its text is missing. In an exchange gloo knows whom it needs, unless the connection
// of a process that ended is held open.
void Watch::State::look_for_the_lost(const std::shared_ptr<const Awaited>& wanted) {
  const std::vector<int64_t> gone = wanted ? peers.lost() : peers.ended_unseen();
  for (const int64_t one : gone) {
    if (wanted && !is_missing(*wanted, one)) continue;
    report({one, concat("rank ", one, " ", describe(peers.fate(one)))});
    return;
  }
  if (!wanted) return;
  std::vector<int64_t> silent;
  {
    const std::lock_guard lock(mutex);
    for (const int64_t one : missing) {
      const bool was_heard =
          !heard[one].text.empty() && Clock::now() - std::max(heard[one].at, waiting_since) > kSilence;
      if (was_heard && !peers.is_watched(one)) silent.push_back(one);
    }
  }
  if (silent.empty()) return;
  report({silent.front(), concat("rank ", silent.front(), " has said nothing for ", kSilence / 1s, " s")});
}

void Watch::State::read_positions() {
  for (int64_t other = 0; other < size; ++other) {
    const std::string key = concat(prefix, "at/", other);
    if (other == rank || !store->check({key})) continue;
    const std::string text = text_of(store->get(key));
    std::istringstream numbers(text);
    Position position;
    int64_t age = 0;
    numbers >> position.number >> position.step >> position.count >> position.waits >> age;
    const std::lock_guard lock(mutex);
    if (heard[other].text != text) heard[other] = {text, Clock::now()};
    if (positions[other] == position) continue;
    positions[other] = position;
    moved = std::max(moved, Clock::now() - Milliseconds(age));
  }
}

bool Watch::State::is_missing(const Awaited& wanted, int64_t of_rank) {
  return of_rank != rank && !store->check({prefix + wanted.keys[of_rank]});
}

std::vector<int64_t> Watch::State::missing_of(const Awaited& wanted) {
  std::vector<int64_t> ranks;
  for (int64_t other = 0; other < size; ++other) {
    if (is_missing(wanted, other)) ranks.push_back(other);
  }
  return ranks;
}

// Nothing where the verdict is another one: then all texts are there, or such a text already.
void Watch::State::fill_missing(const Awaited& wanted, const std::string& text) {
  const std::string verdict = text_of(store->compareSet(prefix + wanted.verdict, Bytes{}, bytes_of(text)));
  if (verdict != text) return;
  for (const std::string& key : wanted.keys) set_first(*store, prefix + key, text);
}

Failure Watch::State::report(const Failure& mine) {
  if (!store) return mine;
  const std::string text = to_text(mine);
  const Failure first = failure_of(text_of(store->compareSet(concat(prefix, "failed"), Bytes{}, bytes_of(text))));
  set_failure(first);
  return first;
}

void Watch::State::set_failure(const Failure& first) {
  const std::lock_guard lock(mutex);
  failure = first;
}

Watch::Watch(const Group& group, c10::intrusive_ptr<c10d::Store> store)
    : state_(std::make_shared<State>(group, std::move(store))) {
  lane_ = std::make_unique<Lane>([state = state_] { return state->tick(); });
}

Watch::~Watch() = default;

bool Watch::has_store() const { return state_->has_store; }
Peers& Watch::peers() { return state_->peers; }
std::shared_future<Watch::Joined> Watch::joined() const { return state_->joined_future; }

std::vector<int64_t> Watch::not_joined() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<int64_t> ranks;
  for (int64_t other = 0; other < state_->size; ++other) {
    if (state_->prefix.empty() && !state_->is_mutual[other]) ranks.push_back(other);
  }
  return ranks;
}

Watch::Attention::Attention(Watch& watch, std::shared_ptr<const Awaited> awaited) : watch_(watch) {
  {
    State& state = *watch.state_;
    const std::lock_guard lock(state.mutex);
    if (++state.num_waiting == 1) state.waiting_since = Clock::now();
    state.asks_at_once = true;
    state.missing.clear();
    state.awaited = std::move(awaited);
  }
  watch.lane_->wake();
}

Watch::Attention::~Attention() {
  State& state = *watch_.state_;
  const std::lock_guard lock(state.mutex);
  if (--state.num_waiting == 0) state.awaited = nullptr;
}

void Watch::set_receive(c10::intrusive_ptr<c10d::Work> receive) {
  const std::lock_guard lock(state_->mutex);
  state_->receive = std::move(receive);
  state_->receive_since = Clock::now();
}

std::optional<Failure> Watch::failure() const {
  const std::lock_guard lock(state_->mutex);
  return state_->failure;
}

Failure Watch::report(const Failure& failure, Milliseconds patience) {
  auto answer = lane_->ask([state = state_, failure] {
    try {
      return state->report(failure);
    } catch (const std::exception&) {
      return failure;  // the store is gone
    }
  });
  return answer.wait_for(patience) == std::future_status::ready ? answer.get() : failure;
}

bool Watch::give_up(const std::shared_ptr<const Awaited>& awaited) {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->prefix.empty()) {
      std::vector<int64_t> absent;
      for (int64_t other = 0; other < state_->size; ++other) {
        if (!state_->is_mutual[other]) absent.push_back(other);
      }
      state_->to_leave.emplace_back(awaited->keys[state_->rank], awaited->text_of_absence(absent));
      return false;
    }
  }
  lane_->ask([state = state_, awaited] {
    if (!state->store) return;
    const std::vector<int64_t> absent = state->missing_of(*awaited);
    if (!absent.empty()) state->fill_missing(*awaited, awaited->text_of_absence(absent));
  });
  return true;
}

std::future<void> Watch::leave(const std::string& key, const std::string& text) {
  return lane_->ask([state = state_, key, text] {
    if (state->store) {
      set_first(*state->store, state->prefix + key, text);
      return;
    }
    const std::lock_guard lock(state->mutex);
    state->to_leave.emplace_back(key, text);
  });
}

void Watch::move_to(const Position& position) {
  const std::lock_guard lock(state_->mutex);
  state_->own_since = Clock::now();
  if (state_->own.number != position.number) state_->call_since = state_->own_since;
  state_->own = position;
}

Watch::Overview Watch::overview() const {
  const std::lock_guard lock(state_->mutex);
  return {state_->positions, state_->missing, state_->moved};
}

std::vector<int64_t> Watch::last_ranks() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<int64_t> silent, ranks;
  std::pair<bool, int64_t> least{};
  bool has_words = false;
  for (int64_t other = 0; other < state_->size; ++other) {
    if (other == state_->rank) continue;
    const auto& position = state_->positions[other];
    has_words = has_words || position;
    if (!position || position->number < state_->own.number) {
      silent.push_back(other);
      continue;
    }
    const std::pair at(position->waits, position->step);
    if (!ranks.empty() && at > least) continue;
    if (ranks.empty() || at < least) ranks.clear();
    least = at;
    ranks.push_back(other);
  }
  if (!has_words) return {};
  // Who waits is held up by those of whom nothing is known.
  if (!silent.empty() && !ranks.empty() && least.first) ranks.clear();
  ranks.insert(ranks.end(), silent.begin(), silent.end());
  return ranks;
}

}  // namespace ringspan::binding
