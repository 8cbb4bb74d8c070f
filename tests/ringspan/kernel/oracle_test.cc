#include "tests/ringspan/support/oracle.h"

#include <cmath>

#include <gtest/gtest.h>

#include "tests/ringspan/support/masks.h"

namespace ringspan::test {
namespace {

struct Call {
  Inputs inputs;
  Array dout, dlse;
};

// 4 query heads on 2 KV heads, other dims for V, a mask with empty rows.
Call small_call() {
  const DType dtype = DType::kF64;
  Call call;
  call.inputs = {random_array(1, {2, 4, 5, 3}, dtype), random_array(2, {2, 2, 6, 3}, dtype),
                 random_array(3, {2, 2, 6, 2}, dtype), 0.7,
                 [](int64_t b, int64_t i, int64_t j) { return i != 2 && j <= i + b && (i + j) % 3 != 0; }};
  call.dout = random_array(4, {2, 4, 5, 2}, dtype);
  call.dlse = random_array(5, {2, 4, 5, 1}, dtype);
  return call;
}

// The scalar whose gradient oracle_backward() gives.
double loss(const Call& call) {
  const Outputs outputs = oracle_forward(call.inputs);
  double sum = 0;
  for (std::size_t i = 0; i < call.dout.data.size(); ++i) sum += call.dout.data[i] * outputs.out.data[i];
  for (std::size_t i = 0; i < call.dlse.data.size(); ++i) {
    if (std::isfinite(outputs.lse.data[i])) sum += call.dlse.data[i] * outputs.lse.data[i];
  }
  return sum;
}

void expect_central_differences(Call call, Array Inputs::* input, const Array& gradient) {
  constexpr double kStep = 1e-5;
  Array& array = call.inputs.*input;
  for (std::size_t i = 0; i < array.data.size(); ++i) {
    const double kept = array.data[i];
    array.data[i] = kept + kStep;
    const double above = loss(call);
    array.data[i] = kept - kStep;
    const double below = loss(call);
    array.data[i] = kept;
    EXPECT_NEAR((above - below) / (2 * kStep), gradient.data[i], 1e-8) << i;
  }
}

TEST(OracleTest, GradientsAgreeWithCentralDifferences) {
  const Call call = small_call();
  const Gradients gradients = oracle_backward(call.inputs, oracle_forward(call.inputs), call.dout, call.dlse);
  EXPECT_GT(rms(gradients.dq), 0.01);
  expect_central_differences(call, &Inputs::q, gradients.dq);
  expect_central_differences(call, &Inputs::k, gradients.dk);
  expect_central_differences(call, &Inputs::v, gradients.dv);
}

// Two keys with scores 0 and ln 3: weights 1/4 and 3/4.
TEST(OracleTest, WorkedExample) {
  Inputs inputs{Array({1, 1, 1, 1}, 1), Array({1, 1, 2, 1}), Array({1, 1, 2, 1}), 0.5,
                [](int64_t, int64_t, int64_t) { return true; }};
  inputs.k.at(0, 0, 1) = 2 * std::log(3.0);
  inputs.v.at(0, 0, 0) = 8;
  inputs.v.at(0, 0, 1) = 4;
  const Outputs outputs = oracle_forward(inputs);
  EXPECT_NEAR(outputs.out.at(0, 0, 0), 5, 1e-15);
  EXPECT_NEAR(outputs.lse.at(0, 0, 0), std::log(4.0), 1e-15);
  EXPECT_NEAR(outputs.max.at(0, 0, 0), std::log(3.0), 1e-15);
  EXPECT_NEAR(outputs.sum.at(0, 0, 0), 4.0 / 3.0, 1e-15);
}

TEST(OracleTest, EmptyRowsAreEmpty) {
  const Call call = small_call();
  const Outputs outputs = oracle_forward(call.inputs);
  const Gradients gradients = oracle_backward(call.inputs, outputs, call.dout, call.dlse);
  EXPECT_EQ(outputs.out.at(0, 1, 2, 1), 0);
  EXPECT_EQ(outputs.lse.at(0, 1, 2), -INFINITY);
  EXPECT_EQ(outputs.sum.at(0, 1, 2), 0);
  EXPECT_EQ(gradients.dq.at(0, 1, 2, 0), 0);
}

// The tiles that kernels are given and the predicate that the oracle is given are the same set of pairs, each once.
TEST(MasksTest, TilesKeepEachPairOfThePredicateOnce) {
  const std::pair<int64_t, int64_t> lengths[] = {{1, 1}, {7, 31}, {64, 40}, {33, 100}, {0, 5}, {5, 0}};
  for (const MaskKind kind : kAllMasks) {
    for (const auto& [q_len, kv_len] : lengths) {
      const Mask mask = make_mask(kind, 2, q_len, kv_len);
      Array count({2, q_len, kv_len, 1});
      for (const Tile& tile : mask.tiles) {
        for (int64_t a = 0; a < tile.q_rows; ++a) {
          for (int64_t c = 0; c < tile.kv_rows; ++c) {
            const int64_t distance = tile.kv_pos0 + c * tile.kv_stride - tile.q_pos0 - a * tile.q_stride;
            if (tile.lo <= distance && distance <= tile.hi) {
              count.at(tile.batch, tile.q_row0 + a, tile.kv_row0 + c) += 1;
            }
          }
        }
      }
      for_each_index({2, q_len, kv_len, 1}, [&](int64_t b, int64_t i, int64_t j, int64_t) {
        ASSERT_EQ(count.at(b, i, j), mask.keep(b, i, j) ? 1 : 0) << name_of(kind) << " " << b << " " << i << " " << j;
      });
    }
  }
}

TEST(MasksTest, CutTilesKeepThePairs) {
  const Mask mask = make_mask(MaskKind::kStrided, 1, 20, 30);
  EXPECT_TRUE(cut_tiles(mask.tiles, 30, 40).empty());
  const Tile part = cut_tiles(mask.tiles, 10, 25)[0];
  EXPECT_EQ(part.kv_row0, 10);
  EXPECT_EQ(part.kv_rows, 15);
  EXPECT_EQ(part.kv_pos0, 1 + 2 * 10);
}

}  // namespace
}  // namespace ringspan::test
