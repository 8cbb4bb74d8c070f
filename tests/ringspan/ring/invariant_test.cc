// Schedule invariant: the same bits for every number of ranks, every map and every number of threads, on each
// instruction set that this machine offers. One rank with one thread is what all others are held against, and the
// double oracle what that one is.
#include <optional>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/kernel/isa.h"
#include "ringspan/plan/schedules/schedules.h"
#include "ringspan/plan/validate.h"

#include "tests/ringspan/support/ring_cases.h"
#include "tests/ringspan/support/sanitized.h"

namespace ringspan {
namespace {

using test::expect_close;
using test::expected_of;
using test::kIsSanitized;
using test::MapCase;
using test::MaskCase;
using test::RingInputs;
using test::RingResults;
using test::same_bits;

constexpr int64_t kBlock = detail::kInvariantBlock;
constexpr int64_t kLength = 2 * kBlock + 101;  // three blocks, the last one short
const std::vector<int64_t> kDocuments = {390, 1, 700, 546};
const std::vector<int64_t> kWorlds = {2, 3, 4, 6};

std::vector<MaskCase> masks() {
  const int64_t n = kLength;
  std::vector<int64_t> ids;
  for (size_t d = 0; d < kDocuments.size(); ++d) ids.insert(ids.end(), kDocuments[d], static_cast<int64_t>(d));
  // Bands that touch each other for some rows: joined or not, the row's columns must be cut in the same places.
  const MaskSpec two(
      n, n,
      {{{.q_end = n, .kv_end = n, .lo = -150, .hi = 0}, {.q_end = n, .kv_end = 40, .lo = -kNoDiagonal, .hi = -151}}});
  return {
      {"full", MaskSpec::full(n, n), [](int64_t, int64_t, int64_t) { return true; }},
      {"causal", MaskSpec::causal(n, n, Corner::kTopLeft), [](int64_t, int64_t i, int64_t j) { return j <= i; }},
      {"window", MaskSpec::window(n, n, 150, 9, Corner::kTopLeft),
       [](int64_t, int64_t i, int64_t j) { return i - 150 <= j && j <= i + 9; }},
      {"window and first keys", two, [](int64_t, int64_t i, int64_t j) { return j <= i && (i - 150 <= j || j < 40); }},
      {"documents", documents_by_lengths(n, {kDocuments}, {}),
       [ids](int64_t, int64_t i, int64_t j) { return ids[i] == ids[j] && j <= i; }}};
}

// Ranks that hold a run each, out of order, with rows of padding between and behind.
ShardMap padded_runs(int64_t world) {
  std::vector<std::vector<Segment>> ranks(world);
  std::vector<int64_t> rows(world, 0);
  const int64_t runs = 3 * world + 1;
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t begin = kLength * run / runs, end = kLength * (run + 1) / runs, rank = run * 2 % world;
    ranks[rank].insert(ranks[rank].begin(), {.begin = begin, .length = end - begin});
  }
  for (int64_t rank = 0; rank < world; ++rank) {
    for (Segment& segment : ranks[rank]) {
      segment.local_row = rows[rank];
      rows[rank] += segment.length + 2;
    }
  }
  return ShardMap::from_segments(kLength, {ranks}, rows);
}

std::vector<MapCase> maps(int64_t world) {
  // The first rank has two rows, for which kernels have other ways, and of three or more ranks the second has nothing.
  std::vector<int64_t> lengths(world, 0);
  for (int64_t i = 0; i < kLength; ++i) ++lengths[i < 2 ? 0 : world < 3 ? world - 1 : 2 + i * i % (world - 2)];
  return {
      {"contiguous", ShardMap::contiguous(kLength, world)}, {"head_tail", ShardMap::head_tail(kLength, world)},
      {"striped", ShardMap::striped(kLength, world)},       {"per_document", ShardMap::per_document(kDocuments, world)},
      {"from_lengths", ShardMap::from_lengths(lengths)},    {"padded_runs", padded_runs(world)}};
}

Problem problem_of(DType dtype) {
  Problem p;
  p.q_heads = 2;
  p.kv_heads = 1;
  p.q_len = p.kv_len = kLength;
  p.qk_dim = 20;
  p.v_dim = 9;
  p.dtype = dtype;
  p.scale = default_scale(p.qk_dim);
  return p;
}

RingResults run(const Problem& p, const RingInputs& in, const MaskSpec& mask, const ShardMap& map, int threads = 1) {
  return test::run_ring(build_plan(p, mask, map, Schedule::kInvariant), in, {.threads = threads});
}

void expect_same(const RingResults& got, const RingResults& want) {
  for (const auto& [name, tensor] :
       {std::pair("out", &RingResults::out), std::pair("max", &RingResults::max), std::pair("sum", &RingResults::sum),
        std::pair("lse", &RingResults::lse), std::pair("dq", &RingResults::dq), std::pair("dk", &RingResults::dk),
        std::pair("dv", &RingResults::dv)}) {
    EXPECT_TRUE(same_bits(got.*tensor, want.*tensor))
        << name << " differs by " << test::max_error(got.*tensor, want.*tensor);
  }
}

class InvariantTest : public ::testing::TestWithParam<Isa> {
 protected:
  void SetUp() override { force_isa(GetParam()); }
  void TearDown() override { force_isa(std::nullopt); }

  // Every world with every map, or with two of them that change from world to world; a few of those under a sanitizer.
  void expect_invariant(const Problem& p, const RingInputs& in, const MaskSpec& mask, const RingResults& want,
                        bool all_maps) {
    for (const int64_t world : kWorlds) {
      const std::vector<MapCase> all = maps(world);
      for (size_t i = 0; i < all.size(); ++i) {
        if (!all_maps && (i + static_cast<size_t>(world)) % 3 != 0) continue;
        if (!test::runs_case(number_++, 5)) continue;
        SCOPED_TRACE(concat(name_of(p.dtype), ", ", all[i].name, ", world ", world));
        expect_same(run(p, in, mask, all[i].map, 1 + static_cast<int>(i % 2)), want);
        if (HasFailure()) return;
      }
    }
  }

 private:
  int64_t number_ = 0;
};

TEST_P(InvariantTest, NoSplitChangesABit) {
  const bool is_best = GetParam() == available_isas().back();
  if (kIsSanitized && !is_best) GTEST_SKIP() << "the next test runs on this instruction set";
  int64_t number = 0;
  for (const MaskCase& mask : masks()) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      const bool is_main = dtype == DType::kF32 || dtype == DType::kBF16;
      if (!is_main && (!is_best || kIsSanitized)) continue;
      if (!test::runs_case(number++, 3)) continue;
      SCOPED_TRACE(mask.name);
      const Problem p = problem_of(dtype);
      RingInputs in = test::random_inputs(31, p);
      in.dlse = test::random_array(5, {p.batch, p.q_heads, kLength, 1}, DType::kF32);
      const RingResults want = run(p, in, mask.mask, ShardMap::contiguous(kLength, 1));
      if (dtype == DType::kF32) expect_close(want, expected_of(p, in, mask.keep), 1e-5, 5e-5);
      expect_same(run(p, in, mask.mask, ShardMap::contiguous(kLength, 1), 2), want);
      expect_invariant(p, in, mask.mask, want, is_best && is_main && !kIsSanitized);
      if (HasFailure()) return;
    }
  }
}

// Bias, boolean mask, cap, dropout and sink travel with their rows, or are looked up by position.
TEST_P(InvariantTest, WhatChangesPairsKeepsTheBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Problem p = problem_of(dtype);
    RingInputs in = test::random_inputs(32, p);
    in.bias = test::random_array(6, {1, p.q_heads, kLength, kLength}, dtype);
    in.mask = test::random_array(7, {1, 1, kLength, kLength}, DType::kF32);
    for (double& value : in.mask.data) value = value > -0.5 ? 1 : 0;
    in.sink = {0.5, -1};
    in.softcap = 3;
    in.dropout = {.p = 0.2, .seed = 9, .offset = 4};
    test::describe_row_tensors(in, p);
    const MaskSpec mask = masks()[3].mask;
    const RingResults want = run(p, in, mask, ShardMap::contiguous(kLength, 1));
    expect_invariant(p, in, mask, want, false);
    if (HasFailure()) return;
  }
}

// Entries of a batch that are split in different ways, more heads, and queries of another length than keys.
TEST_P(InvariantTest, BatchEntriesMayBeSplitEachInItsOwnWay) {
  Problem p = problem_of(DType::kF32);
  p.batch = 2;
  p.q_heads = 6;
  p.kv_heads = 2;
  p.q_len = kBlock + 30;
  const RingInputs in = test::random_inputs(33, p);
  const MaskSpec mask = MaskSpec::causal(p.q_len, p.kv_len, Corner::kBottomRight);
  const auto lists = [](int64_t length, int64_t world) {
    std::vector<std::vector<std::vector<Segment>>> segments(2);
    for (int64_t batch = 0; batch < 2; ++batch) {
      const ShardMap map = batch == 0 ? ShardMap::head_tail(length, world) : ShardMap::striped(length, world);
      for (int64_t rank = 0; rank < world; ++rank) {
        segments[batch].emplace_back(map.segments(rank).begin(), map.segments(rank).end());
      }
    }
    return ShardMap::from_segments(length, segments);
  };
  const auto run_on = [&](int64_t world, bool by_entry) {
    const ShardMap q = by_entry ? lists(p.q_len, world) : ShardMap::contiguous(p.q_len, world);
    const ShardMap kv = by_entry ? lists(p.kv_len, world) : ShardMap::contiguous(p.kv_len, world);
    const Plan plan = build_plan(p, mask, q, kv, Schedule::kInvariant);
    EXPECT_TRUE(validate(plan, mask).empty());
    return test::run_ring(plan, in);
  };
  const RingResults want = run_on(1, false);
  for (const int64_t world : {1, 2, 3}) {
    for (const bool by_entry : {false, true}) {
      SCOPED_TRACE(concat("world ", world, by_entry ? ", by entry" : ""));
      expect_same(run_on(world, by_entry), want);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, InvariantTest, ::testing::ValuesIn(available_isas()),
                         [](const auto& param) { return std::string(name_of(param.param)); });

TEST(InvariantPlan, EveryMaskAndMapIsProven) {
  const Problem p = problem_of(DType::kBF16);
  for (const MaskCase& mask : masks()) {
    for (const int64_t world : {1, 2, 3}) {
      for (const MapCase& map : maps(world)) {
        SCOPED_TRACE(concat(mask.name, ", ", map.name, ", world ", world));
        const std::vector<std::string> faults =
            validate(build_plan(p, mask.mask, map.map, Schedule::kInvariant), mask.mask);
        EXPECT_TRUE(faults.empty()) << faults.front();
      }
    }
  }
}

// A plan that leaves one side's gradients out, or gives them twice, is no proof of the other side.
TEST(InvariantPlan, EachSideNeedsAllPairsOnce) {
  const MaskSpec mask = MaskSpec::full(kLength, kLength);
  const Plan plan = build_plan(problem_of(DType::kF32), mask, ShardMap::contiguous(kLength, 2), Schedule::kInvariant);
  const auto faults_with = [&](GradientPlace Step::* side, const GradientPlace& place, size_t step) {
    std::vector<RankPlan> parts = {plan.rank(0), plan.rank(1)};
    parts[0].backward[step].*side = place;
    return validate(plan, parts, mask);
  };
  EXPECT_TRUE(faults_with(&Step::dq, {.begins = false}, 2).empty());
  EXPECT_FALSE(faults_with(&Step::dq, {.slot = kNoSlot}, 2).empty());
  EXPECT_FALSE(faults_with(&Step::dkv, {.slot = kNoSlot}, 5).empty());
  EXPECT_FALSE(faults_with(&Step::dq, {.begins = false}, 5).empty());
}

// Full mask, contiguous: what is sent is what the file of the schedule says.
TEST(InvariantPlan, SendsEachRowToEachOtherRank) {
  const Problem p = problem_of(DType::kBF16);
  const MaskSpec mask = MaskSpec::full(kLength, kLength);
  for (const int64_t world : {1, 2, 3}) {
    const Plan plan = build_plan(p, mask, ShardMap::striped(kLength, world), Schedule::kInvariant);
    for (int64_t rank = 0; rank < world; ++rank) {
      const RankPlan part = plan.rank(rank);
      const int64_t kv = part.kv_rows[rank] * p.kv_heads * (p.qk_dim + p.v_dim) * 2;
      const int64_t q = part.q_rows[rank] * p.q_heads * ((p.qk_dim + p.v_dim) * 2 + 2 * 4);
      EXPECT_EQ(sent_bytes(part).forward, (world - 1) * kv);
      EXPECT_EQ(sent_bytes(part).backward, (world - 1) * (kv + q));
    }
  }
}

TEST(InvariantPlan, RowTensorsOfAllEntriesNeedOneOrder) {
  Problem p = problem_of(DType::kF32);
  p.batch = 2;
  p.bias = {.batch = 1, .heads = 1, .element_bytes = 4};
  const MaskSpec mask = MaskSpec::full(kLength, kLength);
  const ShardMap shared = ShardMap::striped(kLength, 2);
  std::vector<std::vector<std::vector<Segment>>> segments(2);
  for (auto& list : segments) {
    for (int64_t rank = 0; rank < 2; ++rank)
      list.emplace_back(shared.segments(rank).begin(), shared.segments(rank).end());
  }
  const ShardMap by_entry = ShardMap::from_segments(kLength, segments);
  EXPECT_NO_THROW(build_plan(p, mask, shared, Schedule::kInvariant));
  EXPECT_THROW(build_plan(p, mask, by_entry, Schedule::kInvariant), Error);
  p.bias.batch = 2;
  EXPECT_NO_THROW(build_plan(p, mask, by_entry, Schedule::kInvariant));
}

}  // namespace
}  // namespace ringspan
