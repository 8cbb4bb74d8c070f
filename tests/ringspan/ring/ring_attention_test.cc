// The executor on in-process ranks against the dense double oracle.
#include "ringspan/ring/ring_attention.h"

#include <cmath>
#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

#include "tests/ringspan/support/ring_cases.h"
#include "tests/ringspan/support/tensor.h"

namespace ringspan {
namespace {

using test::Array;
using test::expect_close;
using test::Expected;
using test::expected_of;
using test::MapCase;
using test::MaskCase;
using test::RingInputs;
using test::RingResults;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

Problem problem_of(int64_t length, DType dtype = DType::kF32) {
  Problem p;
  p.batch = 2;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.q_len = p.kv_len = length;
  p.qk_dim = 24;
  p.v_dim = 16;
  p.dtype = dtype;
  p.scale = default_scale(p.qk_dim);
  return p;
}

std::vector<MaskCase> masks_of(int64_t n) {
  std::vector<int64_t> ids(n);
  for (int64_t i = 0; i < n; ++i) ids[i] = i % 7 == 3 ? 0 : 1 + i / 5;  // padding inside and between documents
  return {
      {"full", MaskSpec::full(n, n), [](int64_t, int64_t, int64_t) { return true; }},
      {"causal", MaskSpec::causal(n, n, Corner::kTopLeft), [](int64_t, int64_t i, int64_t j) { return j <= i; }},
      {"window", MaskSpec::window(n, n, 5, 2, Corner::kTopLeft),
       [](int64_t, int64_t i, int64_t j) { return i - 5 <= j && j <= i + 2; }},
      {"documents", documents_by_ids({ids}, {}),
       [ids](int64_t, int64_t i, int64_t j) { return ids[i] == ids[j] && ids[i] != 0 && j <= i; }},
  };
}

// The last one puts padding rows between and after the segments of each rank, and leaves rank 0 empty if it can.
std::vector<MapCase> maps_of(int64_t n, int64_t world) {
  std::vector<std::vector<Segment>> ranks(world);
  std::vector<int64_t> rows(world);
  const int64_t first = world > 1 ? 1 : 0;
  int64_t position = 0;
  for (int64_t rank = first; rank < world; ++rank) {
    const int64_t end = n * (rank + 1 - first) / (world - first);
    const int64_t middle = (position + end) / 2;
    if (middle > position) ranks[rank].push_back({1, position, middle - position, 1});
    if (end > middle) ranks[rank].push_back({middle - position + 3, middle, end - middle, 1});
    rows[rank] = end - position + 5;
    position = end;
  }
  return {{"contiguous", ShardMap::contiguous(n, world)},
          {"head_tail", ShardMap::head_tail(n, world)},
          {"striped", ShardMap::striped(n, world)},
          {"padded", ShardMap::from_segments(n, {ranks}, rows)}};
}

TEST(RingAttention, EveryMaskMapWorldAndGradientRouteMatchesTheOracle) {
  const int64_t n = 37;
  const Problem p = problem_of(n);
  RingInputs in = test::random_inputs(1, p);
  in.dlse = test::random_array(9, {p.batch, p.q_heads, n, 1}, DType::kF32);
  for (const MaskCase& mask : masks_of(n)) {
    const Expected want = expected_of(p, in, mask.keep);
    for (int64_t world = 1; world <= 4; ++world) {
      for (const MapCase& map : maps_of(n, world)) {
        for (const GradRoute route : {GradRoute::kFromOwner, GradRoute::kFromNext}) {
          SCOPED_TRACE(concat(mask.name, ", ", map.name, ", world ", world, ", route ", static_cast<int>(route)));
          const Plan plan = build_plan(p, mask.mask, map.map, map.map, Schedule::kRing, route);
          expect_close(test::run_ring(plan, in, {.padding = kNan}), want, 1e-5, 5e-5);
        }
      }
    }
  }
}

TEST(RingAttention, DoubleIsExactToItsOwnPrecision) {
  const Problem p = problem_of(29, DType::kF64);
  const RingInputs in = test::random_inputs(2, p);
  const MaskCase mask = masks_of(29)[3];
  const ShardMap map = ShardMap::head_tail(29, 3);
  expect_close(test::run_ring(build_plan(p, mask.mask, map, Schedule::kRing), in), expected_of(p, in, mask.keep), 1e-12,
               1e-12);
}

TEST(RingAttention, SixteenBitErrorDoesNotGrowWithTheRing) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Problem p = problem_of(128, dtype);
    p.batch = 1;
    const RingInputs in = test::random_inputs(6, p);
    const MaskCase mask = masks_of(128)[1];
    const Expected want = expected_of(p, in, mask.keep);
    std::array<double, 4> one_rank{};
    for (const int64_t world : {1, 2, 4, 8, 16}) {
      SCOPED_TRACE(concat(name_of(dtype), ", world ", world));
      const ShardMap map = ShardMap::head_tail(128, world);
      const RingResults got = test::run_ring(build_plan(p, mask.mask, map, Schedule::kRing), in);
      const std::array<double, 4> error{
          test::rms_error(got.out, want.outputs.out), test::rms_error(got.dq, want.gradients.dq),
          test::rms_error(got.dk, want.gradients.dk), test::rms_error(got.dv, want.gradients.dv)};
      if (world == 1) one_rank = error;
      for (int i = 0; i < 4; ++i) EXPECT_LE(error[i], 1.10 * one_rank[i]) << "quantity " << i;
    }
  }
}

TEST(RingAttention, SendsWhatThePlanSays) {
  const Problem p = problem_of(41);
  const RingInputs in = test::random_inputs(3, p);
  for (const GradRoute route : {GradRoute::kFromOwner, GradRoute::kFromNext}) {
    const ShardMap map = ShardMap::head_tail(41, 4);
    const Plan plan = build_plan(p, masks_of(41)[1].mask, map, map, Schedule::kRing, route);
    const RingResults got = test::run_ring(plan, in);
    for (int64_t rank = 0; rank < 4; ++rank) {
      const SentBytes planned = sent_bytes(plan.rank(rank));
      EXPECT_EQ(got.forward[rank].bytes_sent, planned.forward);
      EXPECT_EQ(got.total[rank].bytes_sent, planned.forward + planned.backward);
      // K with V on 3 hops each way, their gradients on 4 or 3.
      EXPECT_EQ(got.total[rank].messages_sent, 3 + 3 + (route == GradRoute::kFromOwner ? 4 : 3));
    }
  }
}

TEST(RingAttention, PaddingRowsGiveZerosAndAreNeverRead) {
  const int64_t n = 23;
  const Problem p = problem_of(n);
  const RingInputs in = test::random_inputs(4, p);
  const ShardMap map = maps_of(n, 3)[3].map;
  const RingResults got =
      test::run_ring(build_plan(p, MaskSpec::full(n, n), map, Schedule::kRing), in, {.padding = 1e30});
  for (int64_t rank = 0; rank < 3; ++rank) {
    const std::vector<int64_t> positions = map.positions(rank);
    for (int64_t s = 0; s < map.local_rows(rank); ++s) {
      if (positions[s] >= 0) continue;
      EXPECT_EQ(got.local_out[rank].at(1, 3, s, 5), 0);
      EXPECT_EQ(got.local_dq[rank].at(1, 3, s, 5), 0);
      EXPECT_EQ(got.local_dk[rank].at(1, 1, s, 5), 0);
    }
  }
}

TEST(RingAttention, AllLayoutsGiveTheSameBits) {
  Problem p = problem_of(19);
  const RingInputs in = test::random_inputs(5, p);
  const ShardMap map = ShardMap::striped(19, 2);
  const MaskSpec mask = masks_of(19)[2].mask;
  const RingResults want = test::run_ring(build_plan(p, mask, map, Schedule::kRing), in);
  for (const Layout layout : {Layout::kBSND, Layout::kBSH, Layout::kSBH}) {
    p.layout = layout;
    const RingResults got = test::run_ring(build_plan(p, mask, map, Schedule::kRing), in);
    EXPECT_EQ(got.out.data, want.out.data) << name_of(layout);
    EXPECT_EQ(got.dk.data, want.dk.data) << name_of(layout);
  }
}

TEST(RingAttention, QueriesMayCoverPartOfTheSequence) {
  // Case A22: queries at global rows 4..7 of 8, on one of two ranks.
  Problem p = problem_of(8);
  const RingInputs in = test::random_inputs(27, p);
  const ShardMap q_map = ShardMap::from_segments(8, {{{}, {{0, 4, 4, 1}}}});
  const ShardMap kv_map = ShardMap::contiguous(8, 2);
  const Plan plan = build_plan(p, MaskSpec::causal(8, 8, Corner::kTopLeft), q_map, kv_map, Schedule::kRing);
  const RingResults got = test::run_ring(plan, in);
  const auto keep = [](int64_t, int64_t i, int64_t j) { return i >= 4 && j <= i; };
  const Expected want = expected_of(p, in, keep);
  EXPECT_LE(test::max_error(got.out, want.outputs.out), 1e-5);
  EXPECT_LE(test::max_error(got.dq, want.gradients.dq), 5e-5);
  EXPECT_LE(test::max_error(got.dk, want.gradients.dk), 5e-5);
  EXPECT_LE(test::max_error(got.dv, want.gradients.dv), 5e-5);
}

TEST(RingAttention, EachBatchEntryMayHaveItsOwnMaskAndMap) {
  Problem p = problem_of(16);
  const RingInputs in = test::random_inputs(8, p);
  const std::vector<int64_t> first{1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4};
  const std::vector<int64_t> second{1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2, 0};
  const MaskSpec mask = documents_by_ids({first, second}, {});
  const ShardMap map =
      ShardMap::from_segments(16, {{{{0, 0, 8, 1}}, {{0, 8, 8, 1}}}, {{{0, 0, 4, 1}, {4, 12, 4, 1}}, {{0, 4, 8, 1}}}});
  const auto keep = [&](int64_t b, int64_t i, int64_t j) {
    const std::vector<int64_t>& ids = b == 0 ? first : second;
    return ids[i] == ids[j] && ids[i] != 0 && j <= i;
  };
  expect_close(test::run_ring(build_plan(p, mask, map, Schedule::kRing), in), expected_of(p, in, keep), 1e-5, 5e-5);
}

TEST(RingAttention, ScoresFarApartMergeWithoutOverflow) {
  // Case A05: scores 0 on one shard and 120 (or -120) on the other, in both orders; by the kernel for few rows and by
  // the one for many.
  for (const int64_t rows : {4, 40}) {
    Problem p = problem_of(2 * rows);
    p.batch = 1;
    p.q_heads = p.kv_heads = 1;
    p.qk_dim = p.v_dim = 16;
    p.scale = 0.25;
    for (const double key : {30.0, -30.0}) {
      for (const int64_t hot : {int64_t{0}, rows}) {
        RingInputs in = test::random_inputs(5, p);
        in.q = Array({1, 1, 2 * rows, 16}, 1);
        in.k = Array({1, 1, 2 * rows, 16}, 0);
        for (int64_t s = hot; s < hot + rows; ++s) {
          for (int64_t d = 0; d < 16; ++d) in.k.at(0, 0, s, d) = key;
        }
        const ShardMap map = ShardMap::contiguous(2 * rows, 2);
        const RingResults got =
            test::run_ring(build_plan(p, MaskSpec::full(2 * rows, 2 * rows), map, Schedule::kRing), in);
        const double lse = (key > 0 ? 120 : 0) + std::log(static_cast<double>(rows));
        const int64_t taken = (key > 0) == (hot == rows) ? rows : 0;
        for (const int64_t row : {int64_t{0}, rows - 1, rows, 2 * rows - 1}) {
          SCOPED_TRACE(concat(rows, " rows, keys of ", key, " from ", hot, " on, row ", row));
          EXPECT_NEAR(got.lse.at(0, 0, row), lse, 1e-5 * lse);
          for (int64_t d = 0; d < 16; ++d) {
            double mean = 0;
            for (int64_t s = taken; s < taken + rows; ++s) mean += in.v.at(0, 0, s, d) / static_cast<double>(rows);
            EXPECT_NEAR(got.out.at(0, 0, row, d), mean, 1e-6);
          }
        }
      }
    }
  }
}

TEST(RingAttention, RemoteKeysReachTheGradients) {
  // Case A07: a backward that reuses the local K/V would not notice a change on the other rank. The keys move along an
  // axis that no query has: out and lse, through which backward hears of what forward sees, keep their bits.
  const Problem p = problem_of(16);
  RingInputs in = test::random_inputs(7, p);
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t n = 0; n < p.q_heads; ++n) {
      for (int64_t s = 0; s < 16; ++s) in.q.at(b, n, s, 0) = 0;
    }
  }
  const Plan plan = build_plan(p, MaskSpec::full(16, 16), ShardMap::contiguous(16, 2), Schedule::kRing);
  const RingResults before = test::run_ring(plan, in);
  for (int64_t s = 8; s < 16; ++s) in.k.at(0, 0, s, 0) += 1;
  const RingResults after = test::run_ring(plan, in);
  EXPECT_EQ(before.out.data, after.out.data);
  EXPECT_EQ(before.lse.data, after.lse.data);
  EXPECT_NE(before.local_dq[0].data, after.local_dq[0].data);
}

TEST(RingAttention, TimingNeverChangesABit) {
  // Case A25: 20 repeats, each rank late by another amount.
  Problem p = problem_of(96);
  p.qk_dim = p.v_dim = 16;
  p.batch = 1;
  const RingInputs in = test::random_inputs(25, p);
  const MaskSpec mask = documents_by_lengths(96, {{30, 7, 59}}, {});
  const Plan plan = build_plan(p, mask, ShardMap::head_tail(96, 4), Schedule::kRing);
  const RingResults want = test::run_ring(plan, in);
  for (int repeat = 0; repeat < 20; ++repeat) {
    const auto late = [&](int64_t rank) {
      std::this_thread::sleep_for(std::chrono::microseconds((rank * 7 + repeat * 5) % 4 * 700));
    };
    const RingResults got = test::run_ring(plan, in, {.before_forward = late, .threads = 1 + repeat % 3});
    ASSERT_EQ(got.out.data, want.out.data);
    ASSERT_EQ(got.lse.data, want.lse.data);
    ASSERT_EQ(got.dq.data, want.dq.data);
    ASSERT_EQ(got.dk.data, want.dk.data);
    ASSERT_EQ(got.dv.data, want.dv.data);
  }
}

TEST(RingAttention, RowsThatKeepNothingAreTheEmptyRow) {
  const Problem p = problem_of(12);
  const RingInputs in = test::random_inputs(11, p);
  const MaskSpec mask(12, 12, {{{4, 12, 6, 12}}});
  for (const int64_t world : {1, 3}) {
    const RingResults got = test::run_ring(build_plan(p, mask, ShardMap::contiguous(12, world), Schedule::kRing), in);
    for (int64_t s = 0; s < 4; ++s) {
      EXPECT_EQ(got.out.at(0, 0, s, 0), 0);
      EXPECT_EQ(got.max.at(0, 0, s), -kInf);
      EXPECT_EQ(got.sum.at(0, 0, s), 0);
      EXPECT_EQ(got.lse.at(0, 0, s), -kInf);
      EXPECT_EQ(got.dq.at(0, 0, s, 0), 0);
      EXPECT_EQ(got.dk.at(0, 0, s, 0), 0);
    }
  }
}

TEST(RingAttention, ALostRankIsNamedWithItsStepAndTransfer) {
  const Problem p = problem_of(12);
  const Plan plan = build_plan(p, MaskSpec::full(12, 12), ShardMap::contiguous(12, 2), Schedule::kRing);
  inproc::Group group(2, {.timeout = std::chrono::milliseconds(50)});
  const Array q({2, 4, 6, 24}, 1), kv({2, 2, 6, 24}, 1), v({2, 2, 6, 16}, 1), o({2, 4, 6, 16}), s({2, 4, 6, 1});
  test::Tensor tq(q, p.dtype), tk(kv, p.dtype), tv(v, p.dtype), out(o, p.dtype), max(s, p.dtype), sum(s, p.dtype),
      lse(s, p.dtype);
  try {
    ring_forward(plan.rank(0), group.endpoint(0), tq.view(), tk.view(), tv.view(),
                 {out.view(), max.view(), sum.view(), lse.view()});
    FAIL() << "rank 1 never called";
  } catch (const TransportError& error) {
    EXPECT_EQ(error.peer, 1);
    EXPECT_EQ(error.step, 0);
    EXPECT_NE(std::string(error.what()).find("step 0, k and v from rank 1 to rank 0"), std::string::npos)
        << error.what();
  }
}

TEST(RingAttention, RefusesViewsThatDoNotFitThePlan) {
  const Problem p = problem_of(12);
  const Plan plan = build_plan(p, MaskSpec::full(12, 12), ShardMap::contiguous(12, 2), Schedule::kRing);
  inproc::Group group(2);
  test::Tensor q(Array({2, 4, 6, 24}), p.dtype), k(Array({2, 2, 6, 24}), p.dtype), wrong(Array({2, 2, 5, 24}), p.dtype),
      v(Array({2, 2, 6, 16}), p.dtype), out(Array({2, 4, 6, 16}), p.dtype), s(Array({2, 4, 6, 1}), p.dtype);
  try {
    ring_forward(plan.rank(0), group.endpoint(0), q.view(), wrong.view(), v.view(),
                 {out.view(), s.view(), s.view(), s.view()});
    FAIL() << "a view of 5 rows was taken for 6";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "k is [2, 2, 5, 24], the plan needs [2, 2, 6, 24]");
  }
  Extras capped, dropping;
  capped.pairs.numbers.softcap = 1e39;
  dropping.pairs.dropout.p = 0.5;
  for (const auto& [extras, refusal] :
       {std::pair(capped, "softcap is 1e+39, which is infinite in fp32"),
        std::pair(dropping, "dropout, slopes and masks by grid need PairInputs::grids, and the call has none")}) {
    try {
      ring_forward(plan.rank(0), group.endpoint(0), {q.view(), k.view(), v.view()},
                   {out.view(), s.view(), s.view(), s.view()}, {.extras = extras});
      FAIL() << refusal;
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), refusal);
    }
  }
  EXPECT_EQ(group.endpoint(0).counters().messages_sent, 0);
}

}  // namespace
}  // namespace ringspan
