#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "ringspan/plan/proof/label_field.h"
#include "ringspan/plan/proof/proof.h"
#include "ringspan/plan/proof/transfer_labels.h"

namespace ringspan::detail {
namespace {

// splitmix64: sums of different sets of marks differ, but for one chance in 2^64.
uint64_t mark_of(int64_t rank, int64_t step) {
  uint64_t z = (static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(step)) * 0x9e3779b97f4a7c15 + 1;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// One tensor of a rank: a field for each batch entry that is told apart.
struct LabelledTensor {
  int64_t rows = 0, head_begin = 0, head_end = 0;
  std::vector<LabelField> entries;
};

using Slot = std::pair<Payload, int64_t>;

// A transfer on its way, as one of its ends sees it.
struct TransferEnd {
  const Transfer* transfer;
  bool arrives;
};

// What was sent: for each entry what the message holds, its rows counted in the message.
using Message = std::vector<std::vector<Rect>>;

// All that a pass of a plan has in common.
struct PassProof {
  const Plan& plan;
  Pass pass;
  int64_t entries;  // batch entries that are told apart
  Faults& faults;
  std::map<Transfer, Message> mail{};
  std::vector<Work> work{};
  // The marks that each gradient ought to have, by payload, owner and entry.
  std::map<std::tuple<Payload, int64_t, int64_t>, LabelField> expected{};

  int64_t entry_of(int64_t batch) const { return entries == 1 ? 0 : batch; }
};

class RankRun {
 public:
  RankRun(const RankPlan& part, PassProof& proof) : part_(part), proof_(proof) {
    std::vector<Payload> inputs = {Payload::kK, Payload::kV};
    const std::vector<Payload> of_rows = row_inputs();
    inputs.insert(inputs.end(), of_rows.begin(), of_rows.end());
    // The caller's bias gradient is zero at first.
    if (wants_dbias()) inputs.push_back(Payload::kDbias);
    for (const Payload payload : inputs) {
      for (LabelField& field : own(payload).entries) field.put(whole(payload, part_.rank));
    }
  }

  // A judge has its own order and does not follow plan/walk.h. It lets gradients arrive before the step posts, where
  // the walk waits for them after the tiles: the same, since no gradient may be posted before the tiles
  // (prove_transfers) and a step that adds to one waits for it first.
  void begin_step(size_t s) {
    if (s >= steps().size()) return;
    const Step& step = steps()[s];
    for (const bool gradients : {false, true}) complete(step.step, gradients);
    post(step, step.before, true);
    if (step.computes) compute(step);
    post(step, step.after, false);
  }

  void finish() {
    for (const bool gradients : {false, true}) complete(static_cast<int64_t>(steps().size()), gradients);
    for (const Payload payload : outputs()) prove_home(payload);
    if (proof_.pass == Pass::kForward && !part_.heads.empty()) prove_padding();
  }

 private:
  const std::vector<Step>& steps() const { return steps_of(part_, proof_.pass); }
  bool is_forward() const { return proof_.pass == Pass::kForward; }
  bool wants_dbias() const { return !is_forward() && part_.problem.bias.has_gradient(); }
  std::vector<Payload> row_inputs() const {
    std::vector<Payload> payloads = {Payload::kQ};
    if (!is_forward()) payloads = {Payload::kQ, Payload::kDout, Payload::kLse, Payload::kDelta};
    if (part_.problem.bias.is_given()) payloads.push_back(Payload::kBias);
    if (part_.problem.mask.is_given()) payloads.push_back(Payload::kMask);
    return payloads;
  }
  std::vector<Payload> outputs() const {
    if (is_forward()) return {Payload::kOut, Payload::kMax, Payload::kSum, Payload::kLse};
    std::vector<Payload> payloads = {Payload::kDq, Payload::kDk, Payload::kDv};
    if (wants_dbias()) payloads.push_back(Payload::kDbias);
    return payloads;
  }
  Rect whole(Payload payload, int64_t owner) const {
    return {
        .head_end = size_of(payload, part_.problem).heads, .count = part_.local_rows(payload, owner), .owner = owner};
  }

  template <class... Parts>
  void complain(const Step& step, const Parts&... what) {
    proof_.faults.add(where(part_, proof_.pass, step.step), ": ", what...);
  }

  LabelledTensor& own(Payload payload) {
    return held(payload,
                {.rows = part_.local_rows(payload, part_.rank), .head_end = size_of(payload, part_.problem).heads});
  }
  // The buffer of a slot; made anew where it had other sizes.
  LabelledTensor& held(Payload payload, const BufferPlace& place) {
    LabelledTensor& held = held_[{payload, place.slot}];
    if (held.entries.empty() || held.rows != place.rows || held.head_begin != place.head_begin ||
        held.head_end != place.head_end) {
      held = {place.rows, place.head_begin, place.head_end,
              std::vector<LabelField>(static_cast<size_t>(proof_.entries))};
    }
    return held;
  }
  LabelledTensor& held_at(const Transfer& t, const BufferPlace& place) {
    return place.slot == kOwnSlot ? own(t.payload) : held(t.payload, place);
  }
  std::pair<int64_t, int64_t> entries_of(const Transfer& t) const {
    // All of a tensor that entries share is for each of them.
    const bool is_all = t.batch_begin == 0 && t.batch_end == size_of(t.payload, part_.problem).batch;
    return is_all ? std::pair<int64_t, int64_t>{0, proof_.entries} : std::pair{t.batch_begin, t.batch_end};
  }

  void post(const Step& step, const std::vector<Transfer>& transfers, bool is_before) {
    for (const Transfer& t : transfers) {
      if (t.src == part_.rank) post_send(step, t);
    }
    for (const Transfer& t : transfers) {
      if (t.dst == part_.rank) post_receive(step, t, is_before);
    }
  }

  void post_send(const Step& step, const Transfer& t) {
    for (const TransferEnd& end : under_way_) {
      if (end.arrives && meets(*end.transfer, end.transfer->to, t, t.from)) {
        complain(step, "sends ", name_of(t.payload), " from slot ", t.from.slot, ", into which it is receiving");
      }
    }
    Message message(static_cast<size_t>(proof_.entries));
    bool is_right = true;
    LabelledTensor& held = held_at(t, t.from);
    const auto [first, last] = entries_of(t);
    for (int64_t entry = first; entry < last; ++entry) {
      for (const EndRun& run : end_runs(t, t.from)) {
        const Window window{t.head_begin, t.head_end, run.row, run.row + run.count};
        int64_t area = 0;
        for (Rect rect : held.entries[static_cast<size_t>(entry)].read(window)) {
          area += rect.area();
          is_right = is_right && (t.owner == kSeveral || (rect.owner == t.owner && is_named(t, run, rect)));
          rect.row += run.message_row - run.row;
          message[static_cast<size_t>(entry)].push_back(rect);
        }
        is_right = is_right && area == window.area();
      }
    }
    if (!is_right) {
      complain(step, "sends ", name_of(t.payload), " of rank ", t.owner, " from slot ", t.from.slot,
               ", which does not hold it");
    }
    proof_.mail[t] = std::move(message);
    if (t.is_sent()) under_way_.push_back({&t, false});
  }

  void post_receive(const Step& step, const Transfer& t, bool is_before) {
    const auto complain_of = [&](const char* why) {
      complain(step, "receives ", name_of(t.payload), " into slot ", t.to.slot, ", ", why);
    };
    for (const TransferEnd& end : under_way_) {
      const Transfer& other = *end.transfer;
      if (!meets(other, end.arrives ? other.to : other.from, t, t.to)) continue;
      if (!end.arrives) complain_of("which is being sent");
      // Additions keep their order; they may follow what they add to.
      if (end.arrives && !(t.adds && other.needed_by <= t.needed_by)) complain_of("into which more is on its way");
    }
    const Operand& read = is_of_kv(t.payload) ? step.kv : step.q;
    if (is_before && step.computes && t.to.slot == read.slot) complain_of("which the tiles of this step read");
    under_way_.push_back({&t, true});
  }

  void complete(int64_t step, bool gradients) {
    std::vector<TransferEnd> left;
    for (const TransferEnd& end : under_way_) {
      const Transfer& t = *end.transfer;
      if (t.needed_by > step || is_gradient(t.payload) != gradients) {
        left.push_back(end);
      } else if (end.arrives) {
        arrive(t);
      }
    }
    under_way_ = std::move(left);
  }

  void arrive(const Transfer& t) {
    const auto found = proof_.mail.find(t);
    if (found == proof_.mail.end()) {
      proof_.faults.add(where(part_, proof_.pass, t.needed_by), ": receives ", name_of(t.payload), " of rank ", t.owner,
                        " into slot ", t.to.slot, ", which was not sent so often");
      return;
    }
    LabelledTensor& held = held_at(t, t.to);
    const auto [first, last] = entries_of(t);
    bool fits = true;
    for (int64_t entry = first; entry < last; ++entry) {
      LabelField& field = held.entries[static_cast<size_t>(entry)];
      for (const EndRun& run : end_runs(t, t.to)) {
        for (Rect rect : cut_message(found->second[static_cast<size_t>(entry)], run)) {
          rect.row += run.row - run.message_row;
          if (t.adds) {
            fits = field.add(rect) && fits;
          } else {
            field.overwrite(rect);
          }
        }
      }
    }
    if (!fits) {
      proof_.faults.add(where(part_, proof_.pass, t.needed_by), ": adds ", name_of(t.payload), " of rank ", t.owner,
                        " to slot ", t.to.slot, ", which does not hold it");
    }
    proof_.mail.erase(found);
  }

  void compute(const Step& step) {
    for (int64_t entry = 0; entry < proof_.entries; ++entry) {
      const std::vector<RowRun> q = operand_runs(step, step.q, row_inputs(), entry);
      const std::vector<RowRun> kv = operand_runs(step, step.kv, {Payload::kK, Payload::kV}, entry);
      take_tiles(step, q, kv, entry);
      if (is_forward()) {
        if (is_last(step)) write_results(step, q, entry);
      } else {
        for (const Payload payload : outputs()) {
          const bool of_kv = is_of_kv(payload);
          const GradientPlace& place = of_kv ? step.dkv : step.dq;
          if (!place.is_computed()) continue;
          add_gradient(step, payload, of_kv ? step.kv : step.q, place, of_kv ? kv : q, entry);
        }
      }
    }
  }

  // The heads of a payload that this rank's blocks use.
  std::vector<HeadRange> heads_used(Payload payload) const {
    std::vector<HeadRange> ranges;
    const bool of_kv = is_of_kv(payload);
    for (const HeadBlock& block : part_.heads) {
      const Operand operand{.head_begin = of_kv ? block.kv_begin : block.q_begin,
                            .head_end = of_kv ? block.kv_end : block.q_end};
      const HeadRange range = heads_of(payload, part_.problem, operand);
      if (ranges.empty() || ranges.back().end <= range.begin) ranges.push_back(range);
    }
    return ranges;
  }

  // What the buffers of an operand hold: the same rows in every tensor and head.
  std::vector<RowRun> operand_runs(const Step& step, const Operand& operand, const std::vector<Payload>& payloads,
                                   int64_t entry) {
    std::vector<RowRun> common;
    bool is_first = true;
    for (const Payload payload : payloads) {
      const auto found = held_.find({payload, operand.slot});
      if (found == held_.end() || found->second.rows != operand.rows) {
        complain(step, "reads ", name_of(payload), " from slot ", operand.slot, ", where it has not arrived");
        return {};
      }
      for (const TransferEnd& end : under_way_) {
        const bool is_late = end.arrives && end.transfer->payload == payload && end.transfer->to.slot == operand.slot;
        if (is_late) complain(step, "reads ", name_of(payload), " from slot ", operand.slot, " while it arrives");
      }
      for (const HeadRange& heads : heads_used(payload)) {
        for (int64_t head = heads.begin; head < heads.end; ++head) {
          const std::vector<RowRun> runs =
              runs_of(found->second.entries[static_cast<size_t>(entry)], head, operand.rows);
          if (is_first) common = runs;
          is_first = false;
          if (runs == common) continue;
          complain(step, "reads ", name_of(payload), " head ", head, " from slot ", operand.slot,
                   ", where other rows lie than elsewhere");
          return {};
        }
      }
    }
    prove_owner(step, operand, common, is_of_kv(payloads.front()));
    return common;
  }

  void prove_owner(const Step& step, const Operand& operand, const std::vector<RowRun>& runs, bool of_kv) {
    if (operand.owner == kSeveral) return;
    int64_t rows = 0;
    for (const RowRun& run : runs) rows += run.owner == operand.owner ? run.count : 0;
    if (rows == operand.rows) return;
    complain(step, "reads ", of_kv ? "K/V" : "queries", " of rank ", operand.owner, " from slot ", operand.slot,
             ", where they have not arrived");
  }

  void take_tiles(const Step& step, const std::vector<RowRun>& q, const std::vector<RowRun>& kv, int64_t entry) {
    int64_t batch_known = -1;
    std::vector<Segment> q_segments, kv_segments;
    for (const Tile& tile : step.tiles) {
      if (tile.batch < 0 || tile.batch >= part_.problem.batch) {
        complain(step, "a tile has batch entry ", tile.batch, " of ", part_.problem.batch);
        continue;
      }
      if (proof_.entry_of(tile.batch) != entry) continue;
      if (tile.batch != batch_known) {
        q_segments = segments_of(q, proof_.plan.q_map(), tile.batch);
        kv_segments = segments_of(kv, proof_.plan.kv_map(), tile.batch);
        batch_known = tile.batch;
      }
      const bool q_fits = lies_in(q_segments, tile.q_row0, tile.q_rows, tile.q_pos0, tile.q_stride);
      const bool kv_fits = lies_in(kv_segments, tile.kv_row0, tile.kv_rows, tile.kv_pos0, tile.kv_stride);
      if (!q_fits) {
        complain(step, "query rows ", tile.q_row0, " + ", tile.q_rows, " are not positions ", tile.q_pos0, " by ",
                 tile.q_stride);
      }
      if (!kv_fits) {
        complain(step, "K/V rows ", tile.kv_row0, " + ", tile.kv_rows, " are not positions ", tile.kv_pos0, " by ",
                 tile.kv_stride);
      }
      if (!q_fits || !kv_fits) continue;
      for (const HeadBlock& block : part_.heads) {
        proof_.work.push_back({part_.rank, step.step, tile, block.q_begin, block.q_end, step.q.owner, step.kv.owner,
                               step.dq.is_computed(), step.dkv.is_computed()});
      }
    }
  }

  bool is_last(const Step& step) const {
    return std::none_of(steps().begin(), steps().end(),
                        [&](const Step& other) { return other.computes && other.step > step.step; });
  }

  // Calls action(field, rect) for the rows and heads of an operand's buffer that this rank works on.
  template <class Action>
  void for_each_rect(Payload payload, const Operand& operand, const std::vector<RowRun>& runs, int64_t entry,
                     Action&& action) {
    const HeadRange heads = heads_of(payload, part_.problem, operand);
    LabelledTensor& buffer =
        operand.slot == kOwnSlot
            ? own(payload)
            : held(payload,
                   {.slot = operand.slot, .rows = operand.rows, .head_begin = heads.begin, .head_end = heads.end});
    for (const HeadRange& used : heads_used(payload)) {
      for (const RowRun& run : runs) {
        action(buffer.entries[static_cast<size_t>(entry)],
               Rect{used.begin, used.end, run.row, run.count, run.owner, run.owner_row});
      }
    }
  }

  void write_results(const Step& step, const std::vector<RowRun>& q, int64_t entry) {
    for (const Payload payload : outputs()) {
      for_each_rect(payload, step.q, q, entry, [](LabelField& field, const Rect& rect) { field.overwrite(rect); });
    }
    if (entry == 0) q_held_ = q, q_held_rows_ = step.q.rows;
  }

  void add_gradient(const Step& step, Payload payload, Operand operand, const GradientPlace& place,
                    const std::vector<RowRun>& runs, int64_t entry) {
    operand.slot = place.slot;
    if (place.slot < 0 || place.slot >= kNumSlots) {
      complain(step, "adds gradients in slot ", place.slot, " of ", kNumSlots);
      return;
    }
    if (place.slot == kOwnSlot && operand.rows != part_.local_rows(payload, part_.rank)) {
      complain(step, "adds ", name_of(payload), " of ", operand.rows, " rows in the caller's tensor");
      return;
    }
    for (const TransferEnd& end : under_way_) {
      const Transfer& t = *end.transfer;
      const int64_t slot = end.arrives ? t.to.slot : t.from.slot;
      if (t.payload == payload && slot == place.slot && t.num_rows() > 0) {
        complain(step, "adds ", name_of(payload), " in slot ", slot, ", which is under way");
      }
    }
    const bool begins = place.begins && !(payload == Payload::kDbias && place.slot == kOwnSlot);
    bool fits = true;
    for_each_rect(payload, operand, runs, entry, [&](LabelField& field, Rect rect) {
      rect.marks = mark_of(part_.rank, step.step);
      if (begins) {
        field.overwrite(rect);
      } else {
        fits = field.add(rect) && fits;
      }
      expect(payload, entry, rect);
    });
    if (!fits) complain(step, "adds ", name_of(payload), " in slot ", place.slot, ", which is not ready for it");
  }

  void expect(Payload payload, int64_t entry, Rect rect) {
    const auto [found, is_new] = proof_.expected.try_emplace({payload, rect.owner, entry});
    if (is_new) found->second.put(whole(payload, rect.owner));
    rect.row = rect.owner_row;
    found->second.add(rect);
  }

  void prove_home(Payload payload) {
    const int64_t rows = part_.local_rows(payload, part_.rank);
    const Window all{0, size_of(payload, part_.problem).heads, 0, rows};
    int64_t missing = 0, wrong = 0;
    for (int64_t entry = 0; entry < proof_.entries; ++entry) {
      int64_t held = 0;
      const LabelField& expected = proof_.expected[{payload, part_.rank, entry}];
      for (const Rect& rect : own(payload).entries[static_cast<size_t>(entry)].read(all)) {
        if (rect.owner == part_.rank && rect.owner_row == rect.row) held += rect.area();
        if (!is_gradient(payload)) continue;
        for (const Rect& want : expected.read({rect.head_begin, rect.head_end, rect.row, rect.row_end()})) {
          wrong += want.marks == rect.marks ? 0 : want.area();
        }
      }
      missing += all.area() - held;
    }
    const char* pass = is_forward() ? " forward" : " backward";
    if (missing > 0) {
      proof_.faults.add("rank ", part_.rank, pass, ": ", missing, " rows of ", name_of(payload),
                        " (all heads counted) never come home");
    }
    if (wrong > 0) {
      proof_.faults.add("rank ", part_.rank, pass, ": ", wrong, " rows of ", name_of(payload),
                        " (all heads counted) come home without each rank's part once");
    }
  }

  // The rows that the plan calls padding are those that hold no position.
  void prove_padding() {
    const auto num_lists = static_cast<int64_t>(part_.q_padding.size());
    bool fits = num_lists == proof_.plan.q_map().num_lists();
    for (int64_t list = 0; fits && list < num_lists; ++list) {
      std::vector<RowRange> padding;
      int64_t row = 0;
      const auto add_up_to = [&](int64_t end) {
        if (end > row) padding.push_back({row, end});
      };
      for (const Segment& segment : segments_of(q_held_, proof_.plan.q_map(), list)) {
        add_up_to(segment.local_row);
        row = segment.local_row + segment.length;
      }
      add_up_to(q_held_rows_);
      fits = padding == part_.q_padding[static_cast<size_t>(list)];
    }
    if (!fits) proof_.faults.add("rank ", part_.rank, " forward: names other padding rows than its queries have");
  }

  const RankPlan& part_;
  PassProof& proof_;
  std::map<Slot, LabelledTensor> held_;
  std::vector<TransferEnd> under_way_;
  std::vector<RowRun> q_held_;
  int64_t q_held_rows_ = 0;
};

// One where every transfer carries all batch entries, so that they need not be told apart.
int64_t entries_of(const Plan& plan, std::span<const RankPlan> parts, Pass pass) {
  for (const RankPlan& part : parts) {
    for (const Step& step : steps_of(part, pass)) {
      for (const auto* transfers : {&step.before, &step.after}) {
        for (const Transfer& t : *transfers) {
          if (t.batch_begin != 0 || t.batch_end != size_of(t.payload, plan.problem()).batch) {
            return plan.problem().batch;
          }
        }
      }
    }
  }
  return 1;
}

}  // namespace

std::vector<Work> prove_flow(const Plan& plan, std::span<const RankPlan> parts, Pass pass, Faults& faults) {
  PassProof proof{plan, pass, entries_of(plan, parts, pass), faults};
  std::vector<std::unique_ptr<RankRun>> runs;
  size_t num_steps = 0;
  for (const RankPlan& part : parts) {
    runs.push_back(std::make_unique<RankRun>(part, proof));
    num_steps = std::max(num_steps, steps_of(part, pass).size());
  }
  for (size_t s = 0; s < num_steps; ++s) {
    for (const auto& run : runs) run->begin_step(s);
  }
  for (const auto& run : runs) run->finish();
  return std::move(proof.work);
}

}  // namespace ringspan::detail
