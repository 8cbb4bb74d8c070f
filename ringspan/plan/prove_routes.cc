#include <algorithm>
#include <utility>

#include "ringspan/plan/proof.h"

namespace ringspan::detail {
namespace {

// A gradient under way: whose it is and which ranks have added to it.
struct Gathered {
  int64_t owner = 0;
  std::vector<bool> ranks;
};

// Plays all ranks step by step for one of dk and dv: each adds its own part, then what is sent moves to where it is
// received.
class RouteRun {
 public:
  RouteRun(Payload payload, int64_t world, Faults& faults)
      : payload_(payload), world_(world), faults_(faults), slots_(world) {}

  void add_part(int64_t step, int64_t rank, const GradientRoutes::Visit& visit) {
    std::map<int64_t, Gathered>& slots = slots_[rank];
    if (visit.begins && !slots.contains(visit.slot)) {
      slots[visit.slot] = {.owner = visit.owner, .ranks = std::vector<bool>(world_, false)};
    } else if (visit.begins) {
      complain(step, rank, "overwrites", visit.owner, visit.slot, "which is in use");
    }
    const auto gathered = slots.find(visit.slot);
    const bool fits = gathered != slots.end() && gathered->second.owner == visit.owner && !gathered->second.ranks[rank];
    if (fits) {
      gathered->second.ranks[rank] = true;
    } else {
      complain(step, rank, "adds its part of", visit.owner, visit.slot, "which is not ready for it");
    }
  }

  void send(int64_t step, const Transfer& transfer) {
    if (transfer.payload != payload_) return;
    const auto gathered = slots_[transfer.src].find(transfer.src_slot);
    if (gathered == slots_[transfer.src].end() || gathered->second.owner != transfer.owner) {
      complain(step, transfer.src, "sends", transfer.owner, transfer.src_slot, "which does not hold it");
      return;
    }
    moving_.emplace_back(&transfer, gathered->second);
  }

  // All that was sent arrives, and only then leaves its source: a slot that still sends cannot receive.
  void deliver(int64_t step) {
    std::vector<std::map<int64_t, Gathered>> arrived(world_);
    for (const auto& [transfer, gathered] : moving_) {
      const bool is_busy = slots_[transfer->dst].contains(transfer->dst_slot);
      const bool is_first = arrived[transfer->dst].try_emplace(transfer->dst_slot, gathered).second;
      if (is_busy || !is_first) {
        complain(step, transfer->dst, "receives", transfer->owner, transfer->dst_slot, "which is in use");
      }
    }
    for (const auto& [transfer, gathered] : moving_) slots_[transfer->src].erase(transfer->src_slot);
    for (int64_t rank = 0; rank < world_; ++rank) slots_[rank].merge(arrived[rank]);
    moving_.clear();
  }

  void come_home() {
    for (int64_t owner = 0; owner < world_; ++owner) {
      std::vector<int64_t> parts(world_, 0);
      for (const auto& [slot, gathered] : slots_[owner]) {
        for (int64_t rank = 0; rank < world_; ++rank) parts[rank] += gathered.owner == owner && gathered.ranks[rank];
      }
      for (int64_t rank = 0; rank < world_; ++rank) {
        if (parts[rank] == 1) continue;
        faults_.add("backward: the part of rank ", rank, " of ", name_of(payload_), " of rank ", owner, " comes home ",
                    parts[rank], " times");
      }
    }
  }

 private:
  void complain(int64_t step, int64_t rank, const char* does, int64_t owner, int64_t slot, const char* why) {
    faults_.add("rank ", rank, " backward step ", step, ": ", does, " ", name_of(payload_), " of rank ", owner,
                ", slot ", slot, ", ", why);
  }

  Payload payload_;
  int64_t world_;
  Faults& faults_;
  std::vector<std::map<int64_t, Gathered>> slots_;  // [rank]
  std::vector<std::pair<const Transfer*, Gathered>> moving_;
};

}  // namespace

void Meetings::add(const Phase& phase, Faults& faults) {
  for (size_t s = 0; s < phase.steps.size(); ++s) {
    const Step& step = phase.steps[s];
    if (step.step != static_cast<int64_t>(s)) faults.add(phase.where(step), ": comes as step ", s);
    for (const auto& [place, transfers] : {std::pair("before", &step.before), std::pair("after", &step.after)}) {
      for (const Transfer& t : *transfers) {
        std::vector<int64_t> rows;
        for (const RowRange& range : t.rows) rows.insert(rows.end(), {range.begin, range.end});
        const Key key{phase.name,    place,       t.step,       t.src,      t.dst,      t.payload,  t.owner,
                      t.batch_begin, t.batch_end, t.head_begin, t.head_end, t.src_slot, t.dst_slot, rows};
        int64_t& balance = balance_[key];
        balance += (t.src == phase.part.rank ? 1 : 0) - (t.dst == phase.part.rank ? 1 : 0);
        if (balance == 0) balance_.erase(key);
      }
    }
  }
  if (phase.steps.size() != static_cast<size_t>(phase.part.world)) {
    faults.add("rank ", phase.part.rank, " ", phase.name, ": has ", phase.steps.size(), " steps, the ring has ",
               phase.part.world);
  }
}

void Meetings::finish(Faults& faults) const {
  for (const auto& [key, balance] : balance_) {
    const auto& [phase, place, step, src, dst, payload, owner, b0, b1, h0, h1, src_slot, dst_slot, rows] = key;
    faults.add(phase, " step ", step, " (", place, "): ", name_of(payload), " of rank ", owner, " from rank ", src,
               " slot ", src_slot, " to rank ", dst, " slot ", dst_slot, " is listed alike by its ",
               balance > 0 ? "source" : "destination", " only");
  }
}

void GradientRoutes::add(const Phase& backward) {
  std::vector<Visit>& visits = ranks_[backward.part.rank];
  for (const Step& step : backward.steps) {
    Visit& visit = visits.emplace_back();
    visit.owner = step.kv_owner;
    visit.slot = step.grad_slot;
    visit.begins = step.grad_begins;
    for (const Transfer& transfer : step.after) {
      const bool is_known = 0 <= transfer.dst && transfer.dst < world_;
      if (is_known && transfer.src == backward.part.rank) visit.sends.push_back(transfer);
    }
  }
}

void GradientRoutes::finish(Faults& faults) const {
  size_t num_steps = 0;
  for (const std::vector<Visit>& visits : ranks_) num_steps = std::max(num_steps, visits.size());
  for (Payload payload : {Payload::kDk, Payload::kDv}) {
    RouteRun run(payload, world_, faults);
    for (size_t s = 0; s < num_steps; ++s) {
      const int64_t step = static_cast<int64_t>(s);
      for (int64_t rank = 0; rank < world_; ++rank) {
        if (s < ranks_[rank].size()) run.add_part(step, rank, ranks_[rank][s]);
      }
      for (const std::vector<Visit>& visits : ranks_) {
        if (s >= visits.size()) continue;
        for (const Transfer& transfer : visits[s].sends) run.send(step, transfer);
      }
      run.deliver(step);
    }
    run.come_home();
  }
}

}  // namespace ringspan::detail
