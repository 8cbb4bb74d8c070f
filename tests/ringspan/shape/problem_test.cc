#include "ringspan/shape/problem.h"

#include <functional>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

Problem good() {
  return {.batch = 2,
          .q_heads = 8,
          .kv_heads = 2,
          .q_len = 16,
          .kv_len = 24,
          .qk_dim = 64,
          .v_dim = 48,
          .dtype = DType::kBF16,
          .layout = Layout::kBSND,
          .scale = 0.125};
}

std::string fault_of(const Problem& problem) {
  try {
    problem.check();
  } catch (const Error& fault) {
    return fault.what();
  }
  return "";
}

TEST(Problem, AcceptsUsableSizes) {
  EXPECT_EQ(fault_of(good()), "");
  Problem empty = good();
  empty.q_len = empty.kv_len = 0;
  EXPECT_EQ(fault_of(empty), "");
  Problem widest = good();
  widest.qk_dim = widest.v_dim = 768;
  EXPECT_EQ(fault_of(widest), "");
}

TEST(Problem, RefusesEachBadFieldWithItsNameAndValue) {
  struct Case {
    std::function<void(Problem&)> spoil;
    const char* field;
    const char* value;
  };
  const Case cases[] = {
      {[](Problem& p) { p.batch = 0; }, "batch", "0"},
      {[](Problem& p) { p.q_heads = -8; }, "q_heads", "-8"},
      {[](Problem& p) { p.kv_heads = 0; }, "kv_heads", "0"},
      {[](Problem& p) { p.kv_heads = 3; }, "q_heads 8", "kv_heads 3"},
      {[](Problem& p) { p.q_len = -1; }, "q_len", "-1"},
      {[](Problem& p) { p.kv_len = -7; }, "kv_len", "-7"},
      {[](Problem& p) { p.kv_len = kMaxLength + 1; }, "kv_len", "2147483649"},
      {[](Problem& p) { p.qk_dim = 0; }, "qk_dim", "0"},
      {[](Problem& p) { p.qk_dim = 769; }, "qk_dim", "769"},
      {[](Problem& p) { p.v_dim = 1000; }, "v_dim", "1000"},
      {[](Problem& p) { p.scale = std::numeric_limits<double>::quiet_NaN(); }, "scale", "nan"},
      {[](Problem& p) { p.scale = std::numeric_limits<double>::infinity(); }, "scale", "inf"},
      {[](Problem& p) { p.scale = 1e39; }, "scale is 1e+39", "infinite in fp32"},
      {[](Problem& p) { p.scale = -3.5e38; }, "scale is -3.5e+38", "infinite in fp32"},
  };
  for (const Case& c : cases) {
    Problem problem = good();
    c.spoil(problem);
    const std::string fault = fault_of(problem);
    EXPECT_NE(fault.find(c.field), std::string::npos) << c.field << ": " << fault;
    EXPECT_NE(fault.find(c.value), std::string::npos) << c.value << ": " << fault;
  }
}

TEST(Problem, TakesScalesUpToTheLargestOfTheAccumulatorType) {
  Problem problem = good();
  const auto dim = static_cast<double>(problem.qk_dim);
  problem.scale = std::numeric_limits<float>::max() / dim;
  EXPECT_EQ(fault_of(problem), "");
  problem.scale = std::numeric_limits<float>::max();  // a score of vectors of ones
  EXPECT_NE(fault_of(problem).find("and qk_dim 64"), std::string::npos) << fault_of(problem);
  problem.dtype = DType::kF64;
  EXPECT_EQ(fault_of(problem), "");
  problem.scale = std::numeric_limits<double>::max() / dim;
  EXPECT_EQ(fault_of(problem), "");
}

TEST(Problem, PrintsEverySize) {
  EXPECT_EQ(good().str(), "batch 2, heads 8/2, q_len 16, kv_len 24, qk_dim 64, v_dim 48, bf16, BSND, scale 0.125");
}

TEST(Problem, DefaultScale) {
  EXPECT_DOUBLE_EQ(default_scale(64), 0.125);
  EXPECT_DOUBLE_EQ(default_scale(1), 1.0);
}

TEST(Layout, NamesRoundTrip) {
  for (const char* name : {"BNSD", "BSND", "BSH", "SBH", "TND"}) EXPECT_STREQ(name_of(parse_layout(name)), name);
  EXPECT_THROW(parse_layout("NTD"), Error);
}

}  // namespace
}  // namespace ringspan
