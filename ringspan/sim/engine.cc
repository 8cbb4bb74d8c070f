#include "ringspan/sim/engine.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <queue>

#include "ringspan/base/error.h"
#include "ringspan/plan/walk.h"

namespace ringspan::detail {
namespace {

constexpr double kUnknown = -1;

// A function that only fetches ahead has no effect that the compiler knows of: it drops the call, unless it is inlined.
#define RINGSPAN_FETCHES [[gnu::always_inline]] inline

// Starts to bring memory into the cache.
RINGSPAN_FETCHES void prefetch(const void* begin, size_t bytes) {
  constexpr size_t kLine = 64;
  for (size_t offset = 0; offset < bytes; offset += kLine) {
    __builtin_prefetch(static_cast<const char*>(begin) + offset);
  }
}

// A post of one rank, from when it is posted until no rank asks for it any more.
struct PostTimes {
  const PostCost* cost = nullptr;
  double posted = 0, ready = 0;  // when this rank had posted it; the latest of its peers so far
  int64_t missing = 0;           // peers that have not
  double seconds = 0;            // on its links
  double done = kUnknown;
};

// The posts of a rank that a rank may still ask for, by number: a ring of slots that only grows.
class PostQueue {
 public:
  int64_t first() const { return first_; }
  int64_t end() const { return end_; }
  PostTimes& at(int64_t number) { return slots_[number & (std::ssize(slots_) - 1)]; }
  PostTimes& add(const PostTimes& post) {
    if (end_ - first_ == std::ssize(slots_)) grow();
    return at(end_++) = post;
  }
  void drop_first() { ++first_; }
  // Those in use and the next: a processor can wait for few lines at a time.
  RINGSPAN_FETCHES void prefetch() const {
    if (slots_.empty()) return;
    for (int64_t number = first_; number <= end_; ++number) {
      __builtin_prefetch(&slots_[number & (std::ssize(slots_) - 1)]);
    }
  }

 private:
  void grow() {
    std::vector<PostTimes> old(std::max<size_t>(8, 2 * slots_.size()));
    old.swap(slots_);
    for (int64_t number = first_; number < end_; ++number) at(number) = old[number & (std::ssize(old) - 1)];
  }

  std::vector<PostTimes> slots_{};  // a power of two of them
  int64_t first_ = 0, end_ = 0;
};

// One that its rank has not waited for yet; what the wait asks of it lies here, and not behind a pointer.
struct AwaitedPost {
  int64_t number = 0, needed_by = 0;
  double unpack_seconds = 0;
};

struct RankState {
  const PassCost* cost = nullptr;
  int64_t shift = 0;  // from the rank that stands for this one
  int64_t node = 0;
  Walk walk{0};
  double now = 0;
  bool is_blocked = false, is_computing = false, keeps_steps = false;
  double links_free = 0;
  int64_t next_on_links = 0;  // number of the post
  double beside = 0;          // seconds of messages that no computation or wait has met yet
  PostQueue posts{};
  std::vector<AwaitedPost> open_inputs{}, open_gradients{};  // by number, ascending
  double computing_until = 0;                                // on the node's shared clock
  RankTimes times{};
};

// Ranks of a node that share its processors. Its own clock goes at the speed at which each of them computes.
struct Node {
  double clock = 0, at = 0;  // the clock, and the time at which it stood there
  std::vector<int64_t> running{};
  int64_t version = 0;  // of the event that says who is done next
};

struct Event {
  double time = 0;
  int64_t id = 0;        // a rank that goes on; a node where `version` is not negative
  int64_t version = -1;  // Node::version
  bool operator>(const Event& other) const { return time > other.time; }
};

// Of all ranks: those that have posted a post, and the latest of them.
struct Gathering {
  int64_t ranks = 0;
  double ready = 0;
};

class Engine {
 public:
  Engine(const Sample& sample, const std::vector<const PassCost*>& costs, const Machine& machine, Exchange exchange,
         const std::vector<int64_t>& steps_of)
      : machine_(machine),
        world_(sample.world()),
        waits_for_all_(machine.all_to_all_waits_for_all && exchange != Exchange::kP2p),
        shares_(std::min(machine.ranks_per_node, world_) > machine.processors_per_node),
        ranks_(world_),
        nodes_(shares_ ? (world_ + machine.ranks_per_node - 1) / machine.ranks_per_node : 0) {
    for (int64_t rank = 0; rank < world_; ++rank) {
      const int64_t index = sample.index_for(rank);
      ranks_[rank].cost = costs[index];
      ranks_[rank].walk = Walk(costs[index]->num_steps());
      ranks_[rank].shift = rank - sample.ranks()[index];
      ranks_[rank].node = rank / machine.ranks_per_node;
      resume(rank, 0);
    }
    for (const int64_t rank : steps_of) {
      RINGSPAN_CHECK(0 <= rank && rank < world_, "simulate: rank ", rank, " is outside a world of ", world_, " ranks");
      ranks_[rank].keeps_steps = true;
    }
  }

  PassTimes run() {
    while (!resumed_.empty() || !events_.empty()) {
      if (!resumed_.empty()) {
        const int64_t r = resumed_.front();
        resumed_.pop_front();
        prefetch_next();
        advance(r);
        continue;
      }
      const Event event = events_.top();
      events_.pop();
      if (event.version >= 0) {
        finish_on_node(event);
      } else {
        advance(event.id);
      }
    }
    PassTimes times;
    for (RankState& rank : ranks_) {
      RINGSPAN_CHECK(rank.walk.is_done(), "simulate: a rank waits for a message that no rank sends");
      times.seconds = std::max(times.seconds, rank.times.end);
      times.ranks.push_back(std::move(rank.times));
    }
    return times;
  }

 private:
  // No time depends on the order in which ranks go on, unless they share processors: those go on in the order of time.
  void resume(int64_t r, double time) {
    if (shares_) {
      events_.push({time, r});
    } else {
      resumed_.push_back(r);
    }
  }

  // Thousands of ranks do not fit into the caches, and only we know who is next: this takes a third off the time.
  RINGSPAN_FETCHES void prefetch_next() const {
    constexpr size_t kSoon = 3, kLater = 7;  // what a rank points to is known when the rank is there
    if (resumed_.size() <= kLater) return;
    prefetch(&ranks_[resumed_[kLater]], sizeof(RankState));
    const RankState& soon = ranks_[resumed_[kSoon]];
    __builtin_prefetch(soon.open_inputs.data());
    __builtin_prefetch(soon.open_gradients.data());
    soon.posts.prefetch();
  }

  // Until the rank is blocked, computes or, where it shares, its time has moved by what it has posted.
  void advance(int64_t r) {
    RankState& rank = ranks_[r];
    rank.is_blocked = false;
    const double before = rank.now;
    while (!rank.walk.is_done()) {
      const Act act = rank.walk.act();
      if (!take(r, rank) || rank.is_computing) return;
      const bool has_posted = act == Act::kPostBefore || act == Act::kPostAfter;
      if (shares_ && has_posted && rank.now > before) return resume(r, rank.now);
    }
  }

  // False where the rank cannot do the act yet; it then tries again once something has arrived or the time has come.
  bool take(int64_t r, RankState& rank) {
    const Act act = rank.walk.act();
    if (rank.walk.is_at_end()) {
      if (!wait(rank, act == Act::kWaitGradients)) return false;
      rank.times.end = rank.now;
      rank.walk.next();
      return true;
    }
    const int64_t s = rank.walk.step();
    const StepCost& step = rank.cost->step(s);
    switch (act) {
      case Act::kWaitInputs:
        if (rank.keeps_steps && (rank.times.steps.empty() || rank.times.steps.back().step != s)) {
          rank.times.steps.push_back({s, rank.now, rank.now, rank.now, rank.now});
        }
        if (!wait(rank, false)) return false;
        break;
      case Act::kPostBefore: post_all(r, rank, step.before, step.copy_before_seconds); break;
      case Act::kCompute: return take_compute(r, rank, step);
      case Act::kWaitGradients:
        if (!wait(rank, true)) return false;
        break;
      case Act::kPostAfter:
        post_all(r, rank, step.after, step.copy_after_seconds);
        if (rank.keeps_steps) rank.times.steps.back().end = rank.now;
        break;
      case Act::kDone: break;
    }
    rank.walk.next();
    return true;
  }

  bool take_compute(int64_t r, RankState& rank, const StepCost& step) {
    const double before = rank.now;
    if (step.adds_in_place && !wait(rank, true)) return false;
    if (shares_ && rank.now > before) {  // it begins once the time has come
      resume(r, rank.now);
      return false;
    }
    if (step.computes) {
      begin_compute(r, rank, step);
    } else {
      skip_compute(rank);
    }
    return true;
  }

  // Inputs, or gradients, that the rank's step needs.
  bool wait(RankState& rank, bool gradients) {
    std::vector<AwaitedPost>& open = gradients ? rank.open_gradients : rank.open_inputs;
    if (open.empty()) return true;
    double arrived = rank.now, unpack = 0;
    for (const AwaitedPost& post : open) {
      if (post.needed_by > rank.walk.step()) continue;
      const double done = rank.posts.at(post.number).done;
      if (done == kUnknown) {
        rank.is_blocked = true;
        return false;
      }
      arrived = std::max(arrived, done);
      unpack += post.unpack_seconds;
    }
    const auto is_met = [&](const AwaitedPost& post) { return post.needed_by <= rank.walk.step(); };
    if (std::erase_if(open, is_met) > 0) drop_posts(rank);
    const double waited = arrived - rank.now;
    rank.beside = std::max(0.0, rank.beside - waited);
    rank.times.wait_seconds += waited;
    rank.times.copy_seconds += unpack;
    rank.now = arrived + unpack;
    return true;
  }

  // Those that are waited for and that no peer asks for any more.
  static void drop_posts(RankState& rank) {
    int64_t first_open = rank.posts.end();
    for (const auto* open : {&rank.open_inputs, &rank.open_gradients}) {
      if (!open->empty()) first_open = std::min(first_open, open->front().number);
    }
    while (rank.posts.first() < first_open && rank.posts.at(rank.posts.first()).missing == 0) {
      rank.posts.drop_first();
    }
  }

  void begin_compute(int64_t r, RankState& rank, const StepCost& step) {
    const double met = std::min(rank.beside, step.seconds);
    rank.beside -= met;
    const double seconds = step.seconds + (1 - machine_.overlap) * met;
    if (rank.keeps_steps) rank.times.steps.back().compute_begin = rank.now;
    rank.times.compute_seconds -= rank.now;  // until end_compute
    if (!shares_) {
      rank.now += seconds;
      return end_compute(rank);
    }
    rank.is_computing = true;
    Node& node = nodes_[rank.node];
    move_clock(node, rank.now);
    rank.computing_until = node.clock + seconds;
    node.running.push_back(r);
    announce_next(node, rank.node);
  }

  void end_compute(RankState& rank) {
    rank.times.compute_seconds += rank.now;
    if (rank.keeps_steps) rank.times.steps.back().compute_end = rank.now;
    rank.is_computing = false;
    rank.walk.next();
  }

  void skip_compute(RankState& rank) {
    if (rank.keeps_steps) rank.times.steps.back().compute_begin = rank.times.steps.back().compute_end = rank.now;
    rank.walk.next();
  }

  double speed_on(const Node& node) const {
    return std::min(1.0, static_cast<double>(machine_.processors_per_node) / static_cast<double>(node.running.size()));
  }

  void move_clock(Node& node, double time) const {
    if (!node.running.empty()) node.clock += (time - node.at) * speed_on(node);
    node.at = time;
  }

  void announce_next(Node& node, int64_t n) {
    ++node.version;
    if (node.running.empty()) return;
    double until = std::numeric_limits<double>::infinity();
    for (const int64_t r : node.running) until = std::min(until, ranks_[r].computing_until);
    events_.push({node.at + (until - node.clock) / speed_on(node), n, node.version});
  }

  void finish_on_node(const Event& event) {
    Node& node = nodes_[event.id];
    if (event.version != node.version) return;
    move_clock(node, event.time);
    const auto first = std::min_element(node.running.begin(), node.running.end(), [&](int64_t a, int64_t b) {
      return ranks_[a].computing_until < ranks_[b].computing_until;
    });
    const int64_t r = *first;
    node.running.erase(first);
    announce_next(node, event.id);
    ranks_[r].now = event.time;
    end_compute(ranks_[r]);
    advance(r);
  }

  void post_all(int64_t r, RankState& rank, const std::vector<PostCost>& costs, double copy_seconds) {
    for (const PostCost& cost : costs) post(r, rank, cost);
    rank.now += copy_seconds;
    rank.times.copy_seconds += copy_seconds;
  }

  void post(int64_t r, RankState& rank, const PostCost& cost) {
    rank.now += cost.pack_seconds;
    rank.times.copy_seconds += cost.pack_seconds;
    const int64_t number = rank.posts.end();
    std::vector<AwaitedPost>& open = cost.gradients ? rank.open_gradients : rank.open_inputs;
    open.push_back({number, rank.walk.step() + cost.needed_after, cost.unpack_seconds});
    PostTimes& post = rank.posts.add({.cost = &cost, .posted = rank.now, .ready = rank.now});
    if (cost.peers.empty() && !waits_for_all_) {
      post.done = rank.now;
      return;
    }
    post.seconds = link_seconds(rank, cost);
    rank.beside += post.seconds;
    if (waits_for_all_) {
      post_with_all(post, number);
    } else {
      post_with_peers(r, rank, post, number);
    }
  }

  // The links of a node and of the network work at the same time, sending and receiving too.
  double link_seconds(const RankState& rank, const PostCost& cost) const {
    int64_t sent[2] = {0, 0}, received[2] = {0, 0}, messages[2] = {0, 0};
    for (const PeerBytes& peer : cost.peers) {
      const int leaves = ranks_[peer_rank(rank, peer)].node != rank.node;
      sent[leaves] += peer.sent;
      received[leaves] += peer.received;
      ++messages[leaves];
    }
    double seconds = 0;
    for (const int leaves : {0, 1}) {
      const LinkClass& link = leaves ? machine_.network : machine_.node;
      const auto bytes = static_cast<double>(std::max(sent[leaves], received[leaves]));
      seconds = std::max(seconds,
                         static_cast<double>(messages[leaves]) * link.latency_seconds + bytes / link.bytes_per_second);
    }
    return seconds;
  }

  int64_t peer_rank(const RankState& rank, const PeerBytes& peer) const {
    const int64_t moved = peer.peer + rank.shift;
    return moved < 0 ? moved + world_ : moved >= world_ ? moved - world_ : moved;
  }

  void post_with_peers(int64_t r, RankState& rank, PostTimes& post, int64_t number) {
    for (const PeerBytes& peer : post.cost->peers) {
      const int64_t p = peer_rank(rank, peer);
      RankState& other = ranks_[p];
      if (number < other.posts.first()) continue;  // an estimated peer that does not know of this rank
      if (number >= other.posts.end()) {
        ++post.missing;
        continue;
      }
      PostTimes& theirs = other.posts.at(number);
      post.ready = std::max(post.ready, theirs.posted);
      theirs.ready = std::max(theirs.ready, post.posted);
      if (--theirs.missing == 0) take_links(p);
    }
    if (post.missing == 0) take_links(r);
  }

  // Complete when the last rank has posted it.
  void post_with_all(PostTimes& post, int64_t number) {
    if (number == static_cast<int64_t>(gatherings_.size())) gatherings_.emplace_back();
    Gathering& gathering = gatherings_[number];
    gathering.ready = std::max(gathering.ready, post.posted);
    post.missing = 1;
    if (++gathering.ranks < world_) return;
    for (int64_t r = 0; r < world_; ++r) {
      PostTimes& theirs = ranks_[r].posts.at(number);
      theirs.ready = gathering.ready;
      theirs.missing = 0;
      take_links(r);
    }
  }

  // The posts of a rank take its links in their order, one after the other: those that are ready now.
  void take_links(int64_t r) {
    RankState& rank = ranks_[r];
    rank.next_on_links = std::max(rank.next_on_links, rank.posts.first());
    for (; rank.next_on_links < rank.posts.end(); ++rank.next_on_links) {
      PostTimes& post = rank.posts.at(rank.next_on_links);
      if (post.done != kUnknown) continue;
      if (post.missing > 0) break;
      post.done = std::max(post.ready, rank.links_free) + post.seconds;
      rank.links_free = post.done;
    }
    if (!rank.is_blocked) return;
    rank.is_blocked = false;
    resume(r, std::max(rank.now, rank.links_free));
  }

  const Machine& machine_;
  int64_t world_;
  bool waits_for_all_, shares_;
  std::vector<RankState> ranks_;
  std::vector<Node> nodes_;
  std::vector<Gathering> gatherings_;  // by the number of the post
  std::deque<int64_t> resumed_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

}  // namespace

PassTimes play(const Sample& sample, const std::vector<const PassCost*>& costs, const Machine& machine,
               Exchange exchange, const std::vector<int64_t>& steps_of) {
  return Engine(sample, costs, machine, exchange, steps_of).run();
}

}  // namespace ringspan::detail
