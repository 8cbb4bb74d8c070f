#include "binding/group/mailbox.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "binding/base/errors.h"
#include "binding/watch/bounded_wait.h"
#include "binding/watch/connections.h"
#include "binding/watch/deadline.h"
#include "binding/watch/lane.h"

namespace ringspan::binding {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

// A store answers within this time, or it is out of reach.
constexpr std::chrono::milliseconds kAnswer = 1s;
// Waits for texts end by what is put in their place, not by the store's own timeout.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 20);

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

// A rank that needed longer than this, from the end of its last call until it has all headers, may have been given up
// meanwhile. The shortest deadline is held against this and against how late a rank hears of another's progress.
constexpr Clock::duration kPrompt = 250ms;
constexpr std::chrono::milliseconds kShortDeadline = 2s;
constexpr size_t kMostOwnKeys = 64;

// Keys are "<prefix of the group><call>/<topic>/<rank>", and "v" in the place of the rank: the verdict on a call. Who
// gives up writes it before he puts his text in the place of those that are missing, so that nobody waits in vain;
// who has all texts, but so late that he may have been given up, writes there that it goes on. Whatever
// stands there first counts for all. A rank deletes its keys of older calls once it has read all headers of a newer
// one: who has published call n will never read call n - 1 again.
class StoreMailbox final : public Mailbox {
 public:
  StoreMailbox(const Group& group, Watch& watch) : watch_(watch), desk_(std::make_shared<Desk>()) {
    desk_->rank = group.rank;
    lane_ =
        std::make_unique<Lane>([desk = desk_, left = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group.process_group)] {
          const std::lock_guard lock(desk->door);
          if (left.expired()) {
            desk->store = nullptr;
            return std::optional<std::chrono::milliseconds>();
          }
          if (desk->store) desk->forget();
          return std::optional<std::chrono::milliseconds>(1s);
        });
  }

  std::vector<std::string> swap(const Group& group, const Letter& letter, Patience& patience,
                                Awaited awaited) override {
    awaited.keys = keys_of(group, letter);
    awaited.verdict = key_of(letter, "v");
    const auto wanted = std::make_shared<const Awaited>(std::move(awaited));
    const bool is_sent = desk_->send_now(wanted->keys[group.rank], letter.text);
    const bool is_doubtful = letter.topic == Topic::kHeader && patience.deadline() < kShortDeadline;
    const Clock::time_point prompt = is_doubtful ? Clock::time_point() : last_.load() + kPrompt;
    std::future<std::vector<std::string>> answer =
        lane_->ask([desk = desk_, wanted, letter, joined = watch_.joined(), is_sent, prompt] {
          const std::lock_guard lock(desk->door);
          desk->connect(joined.get());
          const std::string own = is_sent ? letter.text : desk->put(wanted->keys[desk->rank], letter);
          if (own != letter.text) return std::vector<std::string>(wanted->keys.size(), own);
          return desk->collect(*wanted, letter, prompt);
        });
    const bool is_there = wait_for(answer, wanted, patience);
    // Before all have joined nobody can read that this rank gives up: it stands in its own place then.
    if (!is_there) return std::vector<std::string>(wanted->keys.size(), wanted->text_of_absence(watch_.not_joined()));
    try {
      return answer.get();
    } catch (const Error&) {
      throw;  // another version
    } catch (const std::exception& error) {
      throw LostTexts(concat("the group's store does not answer: ", message_of(error)));
    }
  }

  void end_call() override { last_ = Clock::now(); }

  void leave(const Group& group, const Letter& letter) override {
    auto left = watch_.leave(key_of(letter, concat(group.rank)), letter.text);
    // Nothing is read here, so whether the others have come to the last call is asked: they may all refuse for ever.
    lane_->ask([desk = desk_, joined = watch_.joined(), letter, keys = keys_of(group, {letter.number - 1})] {
      const std::lock_guard lock(desk->door);
      desk->connect(joined.get());
      desk->note(letter.number, key_of(letter, concat(desk->rank)));
      desk->forget_read(keys, letter.number - 1);
    });
    left.wait_for(kAnswer);
  }

  bool takes_long_texts() const override { return true; }

 private:
  // What the lane works on, which may outlive the mailbox. All but `door` is of who holds it.
  struct Desk {
    std::mutex door;
    int64_t rank = 0;
    std::string prefix;
    c10::intrusive_ptr<c10d::Store> store;            // null until all have joined
    std::deque<std::pair<int64_t, std::string>> own;  // calls and keys
    int64_t num_read = 0;                             // the last call of which all headers were read

    void connect(const Watch::Joined& joined) {
      if (store) return;
      prefix = joined.prefix;
      store = std::exchange(*joined.store, nullptr);
      store->setTimeout(kForever);
    }

    // What stands under the own key then: not the letter where this rank has given up before all had joined, or was
    // given up.
    std::string put(const std::string& key, const Letter& letter) {
      std::string standing = set_first(*store, prefix + key, letter.text);
      if (standing != letter.text) note(letter.number, key);
      return standing;
    }

    // By the thread that calls, where that cannot be stuck: it saves waking the lane's first.
    bool send_now(const std::string& key, const std::string& text) {
      const std::unique_lock lock(door, std::try_to_lock);
      if (!lock || !store || !sets_without_answer(store)) return false;
      store->set(prefix + key, bytes_of(text));
      return true;
    }

    // All texts; `prompt`: until when they must be there so that nobody can have given up.
    std::vector<std::string> collect(const Awaited& wanted, const Letter& letter, Clock::time_point prompt) {
      note(letter.number, wanted.keys[rank]);
      std::vector<std::string> keys;
      for (size_t other = 0; other < wanted.keys.size(); ++other) {
        if (other != static_cast<size_t>(rank)) keys.push_back(prefix + wanted.keys[other]);
      }
      std::vector<std::string> texts;
      if (keys.size() == 1) texts = read_now(keys[0]);
      if (texts.empty()) {
        for (const auto& value : store->multiGet(keys)) texts.push_back(text_of(value));
      }
      texts.insert(texts.begin() + rank, letter.text);
      if (letter.topic != Topic::kHeader) return texts;
      num_read = std::max(num_read, letter.number);
      if (own.size() > kMostOwnKeys) forget();
      if (Clock::now() < prompt) return texts;
      const std::string verdict = text_of(store->compareSet(prefix + wanted.verdict, {}, bytes_of(kGo)));
      if (rank == 0) note(letter.number, wanted.verdict);
      return verdict == kGo ? texts : std::vector<std::string>(texts.size(), verdict);
    }

    // In one round trip, where it is there: a comparison with what nobody writes gives what stands there, or itself.
    // The server of TCPStore then wakes those that wait for the key, so there must be no other rank that does.
    std::vector<std::string> read_now(const std::string& key) {
      std::string text = text_of(store->compareSet(key, bytes_of(kNothing), bytes_of(kNothing)));
      if (text == kNothing) return {};
      return {std::move(text)};
    }

    void note(int64_t number, const std::string& key) { own.emplace_back(number, key); }

    void forget() {
      for (; !own.empty() && own.front().first < num_read; own.pop_front()) {
        store->deleteKey(prefix + own.front().second);
      }
    }

    void forget_read(std::vector<std::string> keys, int64_t number) {
      if (own.empty() || own.front().first >= number) return;
      for (std::string& key : keys) key = prefix + key;
      if (!store->check(keys)) return;
      num_read = std::max(num_read, number);
      forget();
    }

    static constexpr const char *kGo = "go", *kNothing = "?";
  };

  static std::string key_of(const Letter& letter, const std::string& whose) {
    return concat(letter.number, letter.topic == Topic::kHeader ? "/h/" : "/d/", whose);
  }
  static std::vector<std::string> keys_of(const Group& group, const Letter& letter) {
    std::vector<std::string> keys;
    for (int64_t rank = 0; rank < group.size; ++rank) keys.push_back(key_of(letter, concat(rank)));
    return keys;
  }

  // Until the texts are there, or what stands in their place; false where this rank gives up before all have joined.
  bool wait_for(const std::future<std::vector<std::string>>& answer, const std::shared_ptr<const Awaited>& wanted,
                Patience& patience) {
    if (answer.wait_for(kLook) == std::future_status::ready) return true;
    const Watch::Attention attention(watch_, wanted);
    while (answer.wait_for(kLook) != std::future_status::ready) {
      bool is_over = false;
      try {
        is_over = patience.is_over();
      } catch (...) {
        if (watch_.give_up(wanted)) answer.wait_for(kAnswer);
        throw;
      }
      const auto failure = watch_.failure();
      if (failure && !watch_.not_joined().empty()) throw LostTexts(failure->words);
      if (!is_over) continue;
      if (!watch_.give_up(wanted)) return false;
      if (answer.wait_for(kAnswer) == std::future_status::ready) return true;
      throw LostTexts("the group's store does not answer");
    }
    return true;
  }

  Watch& watch_;
  std::shared_ptr<Desk> desk_;
  std::unique_ptr<Lane> lane_;
  std::atomic<Clock::time_point> last_ = Clock::now();  // the end of the last call
};

// A first frame of fixed size holds the length and the beginning of the text; where any text is longer, a second one
// of the greatest length follows.
//
//   frame   | length (8 bytes) | first 120 bytes |      rest   | what is left, padded to the longest |
class CollectiveMailbox final : public Mailbox {
 public:
  explicit CollectiveMailbox(Watch& watch) : watch_(watch) {}

  std::vector<std::string> swap(const Group& group, const Letter& letter, Patience& patience, Awaited) override {
    try {
      return swap_frames(group, letter.text, [&](const Work& work) { finish(group, work, watch_, patience); });
    } catch (const WaitInterrupted&) {
      throw;
    } catch (const WaitEnded& ended) {
      const std::string& words = ended.failure().words;
      throw LostTexts(words.empty()
                          ? concat("not all came within ", static_cast<double>(patience.deadline().count()) / 1e3, " s")
                          : words);
    } catch (const std::exception& error) {
      throw LostTexts(message_of(error));
    }
  }

  void leave(const Group& group, const Letter& letter) override {
    Patience patience(watch_, deadline_of(group), [&] { return concat("rank ", group.rank, " refuses a call"); });
    swap(group, letter, patience, {});
  }

  void end_call() override {}
  bool takes_long_texts() const override { return false; }

 private:
  static constexpr size_t kFrameBytes = 128, kHeadBytes = kFrameBytes - sizeof(int64_t);

  using Work = c10::intrusive_ptr<c10d::Work>;
  using Finish = std::function<void(const Work&)>;

  static std::vector<std::string> swap_frames(const Group& group, const std::string& mine, const Finish& finish) {
    const auto length = static_cast<int64_t>(mine.size());
    std::string frame(reinterpret_cast<const char*>(&length), sizeof length);
    frame += mine.substr(0, kHeadBytes);
    const std::vector<std::string> frames = gather(group, frame, kFrameBytes, finish);
    std::vector<int64_t> lengths(frames.size());
    int64_t longest = 0;
    for (size_t rank = 0; rank < frames.size(); ++rank) {
      std::memcpy(&lengths[rank], frames[rank].data(), sizeof(int64_t));
      longest = std::max(longest, lengths[rank]);
    }
    std::vector<std::string> rest(frames.size());
    const auto head = static_cast<int64_t>(kHeadBytes);
    if (longest > head) {
      rest = gather(group, mine.size() > kHeadBytes ? mine.substr(kHeadBytes) : "", static_cast<size_t>(longest - head),
                    finish);
    }
    std::vector<std::string> texts;
    for (size_t rank = 0; rank < frames.size(); ++rank) {
      texts.push_back(
          (frames[rank].substr(sizeof(int64_t)) + rest[rank]).substr(0, static_cast<size_t>(lengths[rank])));
    }
    return texts;
  }

  static std::vector<std::string> gather(const Group& group, const std::string& mine, size_t bytes,
                                         const Finish& finish) {
    const auto options = at::TensorOptions().dtype(at::kByte);
    const auto there = [&](const at::Tensor& tensor) { return tensor.to(at::Device(group.device)); };
    const auto size = static_cast<int64_t>(bytes);
    std::vector<at::Tensor> send = {at::zeros({size}, options)};
    std::memcpy(send[0].mutable_data_ptr(), mine.data(), std::min(bytes, mine.size()));
    send[0] = there(send[0]);
    std::vector<std::vector<at::Tensor>> received(1);
    for (int64_t rank = 0; rank < group.size; ++rank) received[0].push_back(there(at::empty({size}, options)));
    // The backend object, not the group: its methods are no dispatcher ops, so no mode counts them.
    const auto work =
        group.backend ? group.backend->allgather(received, send) : group.process_group->allgather(received, send);
    if (work) finish(work);
    std::vector<std::string> texts;
    for (const at::Tensor& text : received[0]) {
      const at::Tensor here = text.cpu();
      texts.emplace_back(static_cast<const char*>(here.const_data_ptr()), bytes);
    }
    return texts;
  }

  Watch& watch_;
};

// Groups that are known to have a store; others (threads as ranks, the fake group, MPI) crash or refuse when asked.
bool has_store(const Group& group) {
  static constexpr const char* kNames[] = {"gloo", "nccl", "ucc", "xccl", "hccl"};
  return group.backend && std::any_of(std::begin(kNames), std::end(kNames),
                                      [&](const char* name) { return group.backend_name == name; });
}

}  // namespace

c10::intrusive_ptr<c10d::Store> store_of(const Group& group) {
  return has_store(group) ? group.process_group->getStore() : nullptr;
}

std::unique_ptr<Mailbox> make_mailbox(const Group& group, Watch& watch) {
  if (group.size <= kMaxStoreRanks) {
    if (watch.has_store()) return std::make_unique<StoreMailbox>(group, watch);
  }
  return std::make_unique<CollectiveMailbox>(watch);
}

}  // namespace ringspan::binding
