// Ranks without query rows, with one, with padding only, and with other rows for each batch entry, under every
// schedule: what is given for pairs counts there as anywhere else, whatever its pointer, and its gradients are whole.
#include <cmath>
#include <functional>
#include <limits>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/ring/ring_attention.h"

#include "tests/ringspan/support/ring_cases.h"
#include "tests/ringspan/support/sanitized.h"

namespace ringspan {
namespace {

using test::Array;
using test::RingInputs;

constexpr int64_t kWorld = 4, kLength = 13;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<Segment> run_of(int64_t row, int64_t position, int64_t count) { return {{row, position, count, 1}}; }

std::vector<test::MapCase> maps() {
  const std::vector<std::vector<Segment>> first{{}, run_of(0, 0, 6), run_of(2, 6, 7), {}};
  const std::vector<std::vector<Segment>> second{run_of(0, 12, 1), {}, run_of(0, 4, 8), run_of(1, 0, 4)};
  return {{"no_rows", ShardMap::from_lengths({0, 9, 0, 4})},
          {"one_row", ShardMap::from_lengths({1, 10, 1, 1})},
          {"all_on_the_last", ShardMap::from_lengths({0, 0, 0, kLength})},
          {"only_padding", ShardMap::from_segments(kLength, {first}, {3, 6, 9, 1})},
          {"by_entry", ShardMap::from_segments(kLength, {first, second})},
          {"by_entry_with_padding", ShardMap::from_segments(kLength, {second, first}, {2, 9, 10, 8})}};
}

Problem problem_of(DType dtype) {
  Problem p;
  p.batch = 2;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.q_len = p.kv_len = kLength;
  p.qk_dim = 5;
  p.v_dim = 3;
  p.dtype = dtype;
  p.scale = default_scale(p.qk_dim);
  return p;
}

enum class Terms { kBias, kMask, kAll };

// One tensor for pairs of each shape: [B or 1, N or 1, S or 1, K].
RingInputs inputs_of(const Problem& p, int shape, Terms terms, const ShardMap& map, uint64_t seed) {
  RingInputs in = test::random_inputs(seed, p);
  const auto size_of_shape = [&](int bits) {
    std::array<int64_t, 4> size{bits & 1 ? p.batch : 1, bits & 2 ? p.q_heads : 1, bits & 4 ? p.q_len : 1, p.kv_len};
    // What is split by rows differs from entry to entry as these do.
    if (size[2] == p.q_len && map.num_lists() > 1) size[0] = p.batch;
    return size;
  };
  if (terms != Terms::kMask) {
    in.bias = test::random_array(seed + 7, size_of_shape(shape), p.dtype);
    in.bias.data.front() = -kInfinity;
  }
  if (terms != Terms::kBias) {
    in.mask = test::random_array(seed + 8, size_of_shape(terms == Terms::kAll ? 7 - shape : shape), p.dtype);
    for (double& value : in.mask.data) value = value > -0.7;
    in.mask_marks_masked = shape % 2 == 1;
  }
  if (terms != Terms::kAll) return in;
  in.bias_factor = 0.75;
  in.slopes = Array({1, p.q_heads, 1, 1}, 0.0625);
  in.slope_shift = 1;
  in.sink = {-0.5, 1, -kInfinity, 0.25};
  in.softcap = 2;
  in.dropout = {0.25, 11, 5};
  in.dlse = test::random_array(seed + 9, {p.batch, p.q_heads, p.q_len, 1}, accumulator_of(p.dtype));
  return in;
}

void check_schedules(const test::MapCase& map, DType dtype) {
  int64_t number = 0;
  for (const Schedule& schedule : schedules_for(kWorld)) {
    for (int shape = 0; shape < 8; ++shape) {
      for (const Terms terms : {Terms::kBias, Terms::kMask, Terms::kAll}) {
        if (!test::runs_case(++number, 7)) continue;
        SCOPED_TRACE(testing::Message() << map.name << ", " << name_of(schedule) << ", shape " << shape << ", terms "
                                        << static_cast<int>(terms));
        Problem p = problem_of(dtype);
        const RingInputs in = inputs_of(p, shape, terms, map.map, 100 + static_cast<uint64_t>(number));
        test::describe_row_tensors(in, p);
        const MaskSpec mask = MaskSpec::causal(p.q_len, p.kv_len, Corner::kTopLeft);
        const Plan plan = build_plan(p, mask, map.map, schedule);
        const test::RingResults got = test::run_ring(plan, in, {.padding = std::nan("")});
        test::expect_exact(p, in, [](int64_t, int64_t i, int64_t j) { return j <= i; }, got);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

class EmptyShardsTest : public testing::TestWithParam<size_t> {};

TEST_P(EmptyShardsTest, PairTensorsOfEveryShapeCountUnderEverySchedule) {
  const DType dtypes[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kF16};
  check_schedules(maps()[GetParam()], dtypes[GetParam() % 4]);
}

INSTANTIATE_TEST_SUITE_P(Maps, EmptyShardsTest, testing::Range(size_t{0}, maps().size()),
                         [](const auto& param) { return maps()[param.param].name; });

// A call of two ranks, the second without query rows, as its caller builds it.
struct SmallCall {
  explicit SmallCall(Schedule schedule, bool by_row)
      : plan(plan_of(schedule, by_row)), bias(Array({1, 1, 1, 6}, 0.5), DType::kF32) {}

  static Plan plan_of(Schedule schedule, bool by_row) {
    Problem p{.batch = 1, .q_heads = 2, .kv_heads = 2, .q_len = 6, .kv_len = 6, .qk_dim = 4, .v_dim = 4, .scale = 1};
    if (by_row) p.bias = {1, 1, 4, true};
    return build_plan(p, MaskSpec::full(6, 6), ShardMap::from_lengths({6, 0}), ShardMap::from_lengths({3, 3}),
                      schedule);
  }

  // Runs with what `change` makes of the second rank's bias and dbias.
  using Change = std::function<void(ConstTensorView& bias, TensorView& dbias)>;
  void run(const Change& change) {
    inproc::run_ranks(2, [&](Transport& transport) {
      const int64_t rank = transport.rank(), rows = plan.q_map().local_rows(rank);
      const bool by_row = plan.problem().bias.is_given();
      test::Tensor q(Array({1, 2, rows, 4}, 1), DType::kF32), out = q, dq = q, dout = q;
      test::Tensor k(Array({1, 2, 3, 4}, 1), DType::kF32), v = k, dk = k, dv = k;
      test::Tensor max(DType::kF32, {1, 2, rows, 1}), sum = max, lse = max;
      test::Tensor own(Array({1, 1, rows, 6}, 0.5), DType::kF32), own_gradient(DType::kF32, {1, 1, rows, 6}),
          shared = bias;
      Extras extras;
      GradsView grads{dq.view(), dk.view(), dv.view()};
      extras.pairs.bias = std::as_const(by_row ? own : bias).view();
      grads.dbias = (by_row ? own_gradient : shared).view();
      const auto spread = [rows](auto& view) {
        for (const int axis : {0, 1}) view.stride[axis] = 0;
        if (view.rows() != rows) view.stride[2] = 0;
        view.size = {1, 2, rows, 6};
      };
      spread(extras.pairs.bias);
      spread(grads.dbias);
      if (rank == 1) change(extras.pairs.bias, grads.dbias);
      const OutputView output{out.view(), max.view(), sum.view(), lse.view()};
      const RankPlan part = plan.rank(rank);
      const InputsView inputs{q.view(), k.view(), v.view()};
      ring_forward(part, transport, inputs, output, {.extras = extras});
      ring_backward(part, transport, {inputs, output, dout.view()}, grads, {.extras = extras});
    });
  }

  // The message of the Error that `change` causes; "" where there is none.
  std::string refusal(const Change& change) {
    try {
      run(change);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  Plan plan;
  test::Tensor bias;
};

std::vector<Schedule> small_schedules() { return schedules_for(2); }

TEST(RankWithoutRowsTest, AViewWithoutElementsIsGivenWithoutAPointer) {
  for (const Schedule& schedule : small_schedules()) {
    SCOPED_TRACE(name_of(schedule));
    EXPECT_EQ(SmallCall(schedule, true).refusal([](ConstTensorView& bias, TensorView& dbias) {
      bias.data = nullptr;
      dbias.data = nullptr;
    }),
              "");
  }
}

TEST(RankWithoutRowsTest, WhatThePlanHasMustBeGivenThereToo) {
  for (const Schedule& schedule : small_schedules()) {
    SCOPED_TRACE(name_of(schedule));
    SmallCall call(schedule, true);
    EXPECT_NE(call.refusal([](ConstTensorView& bias, TensorView&) { bias = {}; }).find("the plan has a bias"),
              std::string::npos);
    EXPECT_NE(call.refusal([](ConstTensorView&, TensorView& dbias) { dbias = {}; }).find("gradient of the bias"),
              std::string::npos);
  }
}

TEST(RankWithoutRowsTest, TheOneRowForAllQueriesNeedsItsPointerThereToo) {
  for (const Schedule& schedule : small_schedules()) {
    SCOPED_TRACE(name_of(schedule));
    SmallCall call(schedule, false);
    EXPECT_EQ(call.refusal([](ConstTensorView&, TensorView&) {}), "");
    EXPECT_NE(call.refusal([](ConstTensorView& bias, TensorView&) { bias.data = nullptr; }).find("bias has one row"),
              std::string::npos);
    EXPECT_NE(call.refusal([](ConstTensorView&, TensorView& dbias) { dbias.data = nullptr; }).find("dbias has one row"),
              std::string::npos);
  }
}

TEST(RankWithoutRowsTest, AGradientByRowOfAOneRowBiasIsRefusedWhereQueriesTravel) {
  for (const Schedule& schedule : small_schedules()) {
    SCOPED_TRACE(name_of(schedule));
    const std::string refusal =
        SmallCall(schedule, false).refusal([](ConstTensorView&, TensorView& dbias) { dbias.stride[2] = 6; });
    EXPECT_EQ(refusal.find("dbias has a row for each query") != std::string::npos, moves_queries(schedule)) << refusal;
  }
}

TEST(RankWithoutRowsTest, AViewThatIsFilledByHandIsRefused) {
  SmallCall call(Schedule::kUlysses, true);
  const std::string refusal = call.refusal([](ConstTensorView& bias, TensorView&) {
    ConstTensorView view;
    view.size = bias.size;
    bias = view;
  });
  EXPECT_NE(refusal.find("bias has sizes and is not given"), std::string::npos) << refusal;
}

}  // namespace
}  // namespace ringspan
