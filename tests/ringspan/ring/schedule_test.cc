// Every schedule, run by the executor on in-process ranks, against the dense double oracle; its ledger against what was
// sent; and the figures that a schedule is for.
#include "ringspan/plan/schedule.h"

#include <cmath>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/ledger/ledger.h"
#include "ringspan/plan/schedules/schedules.h"
#include "ringspan/plan/validate.h"

#include "tests/ringspan/support/ring_cases.h"
#include "tests/ringspan/support/sanitized.h"

namespace ringspan {
namespace {

using test::expect_close;
using test::Expected;
using test::expected_of;
using test::MapCase;
using test::MaskCase;
using test::RingInputs;
using test::RingResults;

constexpr int64_t kLength = 26;
const std::vector<int64_t> kDocuments = {9, 4, 13};

std::vector<MaskCase> masks() {
  const int64_t n = kLength;
  std::vector<int64_t> ids;
  for (size_t d = 0; d < kDocuments.size(); ++d) ids.insert(ids.end(), kDocuments[d], static_cast<int64_t>(d));
  return {{"full", MaskSpec::full(n, n), [](int64_t, int64_t, int64_t) { return true; }},
          {"causal", MaskSpec::causal(n, n, Corner::kTopLeft), [](int64_t, int64_t i, int64_t j) { return j <= i; }},
          {"window", MaskSpec::window(n, n, 3, 0, Corner::kTopLeft),
           [](int64_t, int64_t i, int64_t j) { return i - 3 <= j && j <= i; }},
          {"documents", documents_by_lengths(n, {kDocuments}, {}),
           [ids](int64_t, int64_t i, int64_t j) { return ids[i] == ids[j] && j <= i; }}};
}

std::vector<MapCase> maps(int64_t world) {
  std::vector<int64_t> lengths(world, 0);  // uneven, and the second rank has nothing
  for (int64_t i = 0; i < kLength; ++i) ++lengths[i % 3 == 0 || world < 3 ? 0 : world - 1 - i % (world - 2)];
  return {{"contiguous", ShardMap::contiguous(kLength, world)},
          {"head_tail", ShardMap::head_tail(kLength, world)},
          {"per_document", ShardMap::per_document(kDocuments, world)},
          {"from_lengths", ShardMap::from_lengths(lengths)}};
}

Problem problem_of(int64_t q_heads = 4, int64_t kv_heads = 2) {
  Problem p;
  p.q_heads = q_heads;
  p.kv_heads = kv_heads;
  p.q_len = p.kv_len = kLength;
  p.qk_dim = 12;
  p.v_dim = 7;
  p.scale = default_scale(p.qk_dim);
  return p;
}

// The ledger of the core's own transports against their counters.
void expect_counted(const Plan& plan, const RingResults& got) {
  for (int64_t rank = 0; rank < plan.world(); ++rank) {
    const RankLedger ledger = ledger_of(plan.rank(rank), std::nullopt);
    EXPECT_EQ(got.forward[rank].bytes_sent, ledger.forward.sent_bytes()) << "rank " << rank;
    EXPECT_EQ(got.forward[rank].messages_sent, ledger.forward.messages()) << "rank " << rank;
    EXPECT_EQ(got.total[rank].bytes_sent - got.forward[rank].bytes_sent, ledger.backward.sent_bytes());
    EXPECT_EQ(got.total[rank].messages_sent - got.forward[rank].messages_sent, ledger.backward.messages());
  }
}

std::string joined(const std::vector<std::string>& faults) {
  std::string text;
  for (const std::string& fault : faults) text += fault + "\n";
  return text;
}

TEST(Schedules, EveryMaskMapAndWorldIsExactCountedAndProven) {
  const Problem p = problem_of();
  RingInputs in = test::random_inputs(11, p);
  in.dlse = test::random_array(5, {p.batch, p.q_heads, kLength, 1}, DType::kF32);
  int64_t number = 0;
  for (const MaskCase& mask : masks()) {
    const Expected want = expected_of(p, in, mask.keep);
    for (int64_t world = 1; world <= 6; ++world) {
      for (const MapCase& map : maps(world)) {
        for (const Schedule& schedule : schedules_for(world)) {
          for (const GradRoute route : {GradRoute::kFromOwner, GradRoute::kFromNext}) {
            if (!test::runs_case(number++, 11)) continue;
            SCOPED_TRACE(concat(name_of(schedule), ", ", mask.name, ", ", map.name, ", world ", world, ", route ",
                                static_cast<int>(route)));
            const Plan plan = build_plan(p, mask.mask, map.map, map.map, schedule, route);
            ASSERT_EQ(joined(validate(plan, mask.mask)), "");
            const RingResults got = test::run_ring(plan, in, {.padding = std::nan("")});
            expect_close(got, want, 1e-5, 5e-5);
            expect_counted(plan, got);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// Heads that divide among the ranks or not, fewer KV heads than ranks, fewer heads than ranks.
TEST(Schedules, EveryCountOfHeadsIsExact) {
  const MaskCase mask = masks()[1];
  int64_t number = 0;
  for (const auto& [q_heads, kv_heads] : {std::pair(1, 1), std::pair(2, 1), std::pair(3, 3), std::pair(6, 2),
                                          std::pair(5, 1), std::pair(8, 4), std::pair(12, 3), std::pair(7, 7)}) {
    const Problem p = problem_of(q_heads, kv_heads);
    const RingInputs in = test::random_inputs(12, p);
    const Expected want = expected_of(p, in, mask.keep);
    for (int64_t world = 1; world <= 6; ++world) {
      const ShardMap map = ShardMap::head_tail(kLength, world);
      for (const Schedule& schedule : schedules_for(world)) {
        if (!test::runs_case(number++, 11)) continue;
        SCOPED_TRACE(concat(name_of(schedule), ", heads ", q_heads, "/", kv_heads, ", world ", world));
        const Plan plan = build_plan(p, mask.mask, map, schedule);
        ASSERT_EQ(joined(validate(plan, mask.mask)), "");
        const RingResults got = test::run_ring(plan, in);
        expect_close(got, want, 1e-5, 5e-5);
        expect_counted(plan, got);
        if (HasFailure()) return;
      }
    }
  }
}

// Every rank computes its part of the heads, and no KV head twice in a rank.
TEST(Ulysses, HeadsAreSplitEvenlyAndKeepTheirRatio) {
  for (int64_t ratio = 1; ratio <= 5; ++ratio) {
    for (int64_t kv_heads = 1; kv_heads <= 7; ++kv_heads) {
      const Problem p = problem_of(kv_heads * ratio, kv_heads);
      for (int64_t size = 1; size <= 8; ++size) {
        int64_t next = 0;
        for (int64_t place = 0; place < size; ++place) {
          int64_t count = 0, last_kv = -1;
          for (const HeadBlock& block : detail::heads_of_place(p, place, size)) {
            EXPECT_EQ(block.q_begin, next);
            EXPECT_GT(block.kv_begin, last_kv);
            const int64_t q = block.q_end - block.q_begin, kv = block.kv_end - block.kv_begin;
            ASSERT_EQ(q % kv, 0);
            for (int64_t h = 0; h < q; ++h) EXPECT_EQ((block.q_begin + h) / ratio, block.kv_begin + h / (q / kv));
            next = block.q_end;
            last_kv = block.kv_end - 1;
            count += q;
          }
          EXPECT_LE(std::abs(count * size - p.q_heads), size);
        }
        EXPECT_EQ(next, p.q_heads);
      }
    }
  }
}

int64_t total_forward(const Problem& p, const MaskSpec& mask, const ShardMap& map, const Schedule& schedule) {
  const Plan plan = build_plan(p, mask, map, schedule);
  int64_t bytes = 0;
  for (int64_t rank = 0; rank < plan.world(); ++rank) bytes += sent_bytes(plan.rank(rank)).forward;
  return bytes;
}

Problem long_problem(int64_t length, DType dtype = DType::kBF16) {
  Problem p = problem_of(8, 8);
  p.q_len = p.kv_len = length;
  p.qk_dim = p.v_dim = 64;
  p.dtype = dtype;
  return p;
}

TEST(Pruned, CausalHeadTailSendsThreeQuartersOfTheRing) {
  for (int64_t world = 2; world <= 8; ++world) {
    const Problem p = long_problem(64 * world);
    const MaskSpec mask = MaskSpec::causal(p.q_len, p.q_len, Corner::kTopLeft);
    const ShardMap map = ShardMap::head_tail(p.q_len, world);
    EXPECT_EQ(4 * total_forward(p, mask, map, Schedule::kPruned), 3 * total_forward(p, mask, map, Schedule::kRing));
  }
}

// A window of W keys: the W - 1 rows before each shard, however many ranks there are and however long the shards.
TEST(Pruned, AWindowSendsItsOwnWidthWhateverTheNumberOfRanks) {
  const int64_t width = 48, row_bytes = 8 * (64 + 64) * 2;
  for (const int64_t world : {4, 16, 64}) {
    for (const int64_t shard : {64, 256}) {
      const Problem p = long_problem(shard * world);
      const MaskSpec mask = MaskSpec::window(p.q_len, p.q_len, width - 1, 0, Corner::kTopLeft);
      const Plan plan = build_plan(p, mask, ShardMap::contiguous(p.q_len, world), Schedule::kPruned);
      for (const int64_t rank : {int64_t{0}, world / 2, world - 1}) {
        const int64_t expected = rank + 1 < world ? (width - 1) * row_bytes : 0;
        EXPECT_EQ(sent_bytes(plan.rank(rank)).forward, expected) << "rank " << rank << " of " << world;
      }
    }
  }
}

TEST(Pruned, DocumentsTravelToTheRanksThatShareThem) {
  const Problem p = long_problem(64);
  // Each document lies on one rank; then the middle one on two.
  EXPECT_EQ(
      total_forward(p, documents_by_lengths(64, {{16, 16, 32}}, {}), ShardMap::contiguous(64, 4), Schedule::kPruned),
      16 * 8 * 128 * 2);
  EXPECT_EQ(total_forward(p, documents_by_lengths(64, {{16, 16, 16, 16}}, {}), ShardMap::contiguous(64, 4),
                          Schedule::kPruned),
            0);
}

TEST(QRing, SendsLessThanTheRingWhereHeadsAreAsMany) {
  const MaskSpec mask = MaskSpec::full(256, 256);
  const ShardMap map = ShardMap::contiguous(256, 4);
  for (const auto& [dtype, share] : {std::pair(DType::kBF16, 0.68), std::pair(DType::kF32, 0.76)}) {
    const Problem p = long_problem(256, dtype);
    const int64_t q = sent_bytes(build_plan(p, mask, map, Schedule::kQRing).rank(1)).backward;
    const int64_t kv = sent_bytes(build_plan(p, mask, map, Schedule::kRing).rank(1)).backward;
    EXPECT_LE(static_cast<double>(q), share * static_cast<double>(kv));
  }
}

// 8 ranks on 2 nodes of 4: every shard crosses to the other node once, by the rank that holds it.
TEST(DoubleRing, CrossesNodesOnceAShard) {
  const Problem p = long_problem(256);
  const Plan plan = build_plan(p, MaskSpec::full(256, 256), ShardMap::contiguous(256, 8), Schedule::double_ring(4));
  const int64_t shard = 32 * 8 * 128 * 2;
  for (int64_t rank = 0; rank < 8; ++rank) {
    int64_t inside = 0, outside = 0;
    for (const Step& step : plan.rank(rank).forward) {
      for (const Transfer& t : step.before) {
        if (t.src == rank) (t.dst / 4 == rank / 4 ? inside : outside) += bytes_of(t, p);
      }
    }
    EXPECT_EQ(inside, 6 * shard);
    EXPECT_EQ(outside, shard);
  }
}

TEST(ScheduleNames, AreReadBackAndCheckedAgainstTheGroup) {
  for (const Schedule& schedule : schedules_for(12)) EXPECT_EQ(parse_schedule(name_of(schedule)), schedule);
  for (const char* wrong :
       {"", "Ring", "ring:2", "hybrid", "hybrid:", "hybrid:x", "hybrid:2x", "double_ring", "auto"}) {
    EXPECT_THROW(parse_schedule(wrong), Error) << wrong;
  }
  for (const int64_t inner : {0, -1, 3, 8}) {
    EXPECT_THROW(check_schedule(Schedule::hybrid(inner), 4), Error) << inner;
    EXPECT_THROW(check_schedule(Schedule::double_ring(inner), 4), Error) << inner;
  }
}

}  // namespace
}  // namespace ringspan
