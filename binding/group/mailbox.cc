#include "binding/group/mailbox.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "binding/base/errors.h"

namespace ringspan::binding {
namespace {

// Keys are "ringspan/<incarnation>/<call>/<topic>/<rank>". A rank deletes its keys of older calls once it has read all
// headers of a newer one: who has published call n will never read call n - 1 again.
class StoreMailbox final : public Mailbox {
 public:
  StoreMailbox(const Group& group, c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {
    store_->setTimeout(group.timeout());
    // A group of the same name may have lived on this store before.
    const int64_t incarnation = store_->add(concat("ringspan/incarnation/", group.rank), 1);
    prefix_ = concat("ringspan/", incarnation, "/");
  }

  std::vector<std::string> swap(const Group& group, int64_t number, Topic topic, const std::string& mine) override {
    put(group, number, topic, mine);
    std::vector<std::vector<uint8_t>> values;
    try {
      values = store_->multiGet(keys_of_others(group, number, topic));
    } catch (const std::exception& error) {
      throw AbsentRanks(find_absent(group, number, topic), message_of(error));
    }
    forget_before(number);
    std::vector<std::string> texts;
    for (const auto& value : values) texts.emplace_back(value.begin(), value.end());
    texts.insert(texts.begin() + group.rank, mine);
    return texts;
  }

  // Nothing is read here, so whether the others have come to the last call is asked: they may all refuse for ever.
  void leave(const Group& group, int64_t number, Topic topic, const std::string& mine) override {
    const int64_t last = number - 1;
    const bool has_older = !mine_.empty() && mine_.front().first < last;
    if (has_older && store_->check(keys_of_others(group, last, Topic::kHeader))) forget_before(last);
    put(group, number, topic, mine);
  }

  void replace(const Group& group, int64_t number, Topic topic, const std::string& mine) noexcept override {
    try {
      put(group, number, topic, mine);
    } catch (const std::exception&) {
      // The store is gone, and with it everyone who could ask.
    }
  }

 private:
  std::string key_of(int64_t number, Topic topic, int64_t rank) const {
    return concat(prefix_, number, topic == Topic::kHeader ? "/h/" : "/d/", rank);
  }

  std::vector<std::string> keys_of_others(const Group& group, int64_t number, Topic topic) const {
    std::vector<std::string> keys;
    for (int64_t rank = 0; rank < group.size; ++rank) {
      if (rank != group.rank) keys.push_back(key_of(number, topic, rank));
    }
    return keys;
  }

  void put(const Group& group, int64_t number, Topic topic, const std::string& mine) {
    const std::string key = key_of(number, topic, group.rank);
    store_->set(key, std::vector<uint8_t>(mine.begin(), mine.end()));
    mine_.emplace_back(number, key);
  }

  void forget_before(int64_t number) {
    for (; !mine_.empty() && mine_.front().first < number; mine_.pop_front()) store_->deleteKey(mine_.front().second);
  }

  std::vector<int64_t> find_absent(const Group& group, int64_t number, Topic topic) {
    std::vector<int64_t> absent;
    try {
      for (int64_t rank = 0; rank < group.size; ++rank) {
        if (!store_->check({key_of(number, topic, rank)})) absent.push_back(rank);
      }
    } catch (const std::exception&) {
      absent.clear();  // the store itself is gone
    }
    return absent;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
  std::deque<std::pair<int64_t, std::string>> mine_;
};

// A first frame of fixed size holds the length and the beginning of the text; where any text is longer, a second one
// of the greatest length follows.
//
//   frame   | length (8 bytes) | first 120 bytes |      rest   | what is left, padded to the longest |
class CollectiveMailbox final : public Mailbox {
 public:
  std::vector<std::string> swap(const Group& group, int64_t, Topic, const std::string& mine) override {
    try {
      return swap_frames(group, mine);
    } catch (const std::exception& error) {
      throw AbsentRanks({}, message_of(error));
    }
  }

  void leave(const Group& group, int64_t number, Topic topic, const std::string& mine) override {
    swap(group, number, topic, mine);
  }

  void replace(const Group&, int64_t, Topic, const std::string&) noexcept override {}

 private:
  static constexpr size_t kFrameBytes = 128, kHeadBytes = kFrameBytes - sizeof(int64_t);

  static std::vector<std::string> swap_frames(const Group& group, const std::string& mine) {
    const auto length = static_cast<int64_t>(mine.size());
    std::string frame(reinterpret_cast<const char*>(&length), sizeof length);
    frame += mine.substr(0, kHeadBytes);
    const std::vector<std::string> frames = gather(group, frame, kFrameBytes);
    std::vector<int64_t> lengths(frames.size());
    int64_t longest = 0;
    for (size_t rank = 0; rank < frames.size(); ++rank) {
      std::memcpy(&lengths[rank], frames[rank].data(), sizeof(int64_t));
      longest = std::max(longest, lengths[rank]);
    }
    std::vector<std::string> rest(frames.size());
    const auto head = static_cast<int64_t>(kHeadBytes);
    if (longest > head) {
      rest =
          gather(group, mine.size() > kHeadBytes ? mine.substr(kHeadBytes) : "", static_cast<size_t>(longest - head));
    }
    std::vector<std::string> texts;
    for (size_t rank = 0; rank < frames.size(); ++rank) {
      texts.push_back(
          (frames[rank].substr(sizeof(int64_t)) + rest[rank]).substr(0, static_cast<size_t>(lengths[rank])));
    }
    return texts;
  }

  static std::vector<std::string> gather(const Group& group, const std::string& mine, size_t bytes) {
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
    if (work) work->wait();
    std::vector<std::string> texts;
    for (const at::Tensor& text : received[0]) {
      const at::Tensor here = text.cpu();
      texts.emplace_back(static_cast<const char*>(here.const_data_ptr()), bytes);
    }
    return texts;
  }
};

// Groups that are known to have a store; others (threads as ranks, the fake group, MPI) crash or refuse when asked.
bool has_store(const Group& group) {
  static constexpr const char* kNames[] = {"gloo", "nccl", "ucc", "xccl", "hccl"};
  return group.backend && std::any_of(std::begin(kNames), std::end(kNames),
                                      [&](const char* name) { return group.backend_name == name; });
}

}  // namespace

std::unique_ptr<Mailbox> make_mailbox(const Group& group) {
  if (group.size <= kMaxStoreRanks && has_store(group)) {
    if (auto store = group.process_group->getStore()) {
      // A connection of its own: waiting on it holds up no other user of the store, and its timeout is ours.
      return std::make_unique<StoreMailbox>(group, store->clone());
    }
  }
  return std::make_unique<CollectiveMailbox>();
}

}  // namespace ringspan::binding
