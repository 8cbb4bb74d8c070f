// NaN and infinity reach exactly the rows that keep them. Bad values are put into single rows inside of tiles, next to
// rows that must stay as they were: 0 * NaN is the trap.
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"
#include "tests/ringspan/support/sanitized.h"

namespace ringspan::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

enum class Where { kQ, kK, kV, kDout };

struct Bad {
  Where where;
  int64_t row;
  double value;
};

// Row 20 of the q blocks, the last rows, and rows in the middle of a key block.
constexpr Bad kBad[] = {{Where::kK, 133, kNan},       {Where::kK, 280, kInfinity},   {Where::kV, 77, kNan},
                        {Where::kV, 200, -kInfinity}, {Where::kQ, 20, kNan},         {Where::kQ, 250, kInfinity},
                        {Where::kDout, 100, kNan},    {Where::kDout, 255, kInfinity}};

Array& array_of(AttentionCase& c, Where where) {
  switch (where) {
    case Where::kQ: return c.inputs.q;
    case Where::kK: return c.inputs.k;
    case Where::kV: return c.inputs.v;
    case Where::kDout: return c.dout;
  }
  return c.dout;
}

void poison(AttentionCase& c, const Bad& bad) {
  Array& array = array_of(c, bad.where);
  for (int64_t b = 0; b < array.size[0]; ++b) {
    for (int64_t n = 0; n < array.size[1]; ++n) array.at(b, n, bad.row, array.size[3] / 2) = bad.value;
  }
}

// Query rows that a bad value may reach; in backward a bad row's statistics are bad, and so all that it keeps.
bool reaches_query(const AttentionCase& c, const Bad& bad, int64_t i) {
  const bool query_side = bad.where == Where::kQ || bad.where == Where::kDout;
  return query_side ? i == bad.row : c.inputs.keep(0, i, bad.row);
}

bool reaches_key(const AttentionCase& c, const Bad& bad, int64_t j) {
  for (int64_t i = 0; i < c.spec.q_len; ++i) {
    if (reaches_query(c, bad, i) && c.inputs.keep(0, i, j)) return true;
  }
  return false;
}

// Rows that the value may not reach have the bits of the clean run; it does reach the others, somewhere.
template <class Reaches>
void expect_untouched(const char* name, const Array& got, const Array& clean, bool must_show, const Reaches& reaches) {
  bool shown = false;
  int64_t num_untouched = 0;
  for (int64_t s = 0; s < got.size[2]; ++s) {
    const bool reached = reaches(s);
    num_untouched += reached ? 0 : 1;
    for (int64_t b = 0; b < got.size[0]; ++b) {
      for (int64_t n = 0; n < got.size[1]; ++n) {
        for (int64_t d = 0; d < got.size[3]; ++d) {
          const double value = got.at(b, n, s, d);
          if (reached)
            shown = shown || !std::isfinite(value);
          else
            ASSERT_EQ(value, clean.at(b, n, s, d)) << name << " row " << s;
        }
      }
    }
  }
  EXPECT_GT(num_untouched, 0) << name << ": nothing was tested";
  EXPECT_TRUE(shown || !must_show) << name << ": a bad value that is kept was hidden";
}

class AttentionNanTest : public ::testing::TestWithParam<Target> {
 protected:
  // Runs `clean` once more with each bad value in turn.
  void expect_contained(const AttentionCase& clean, std::span<const Bad> bad_values) const {
    const Kernels& kernels = GetParam().kernels;
    const ForwardResult want = run_forward(clean, kernels);
    const BackwardResult want_grads = run_backward(clean, kernels);
    for (const Bad& bad : bad_values) {
      SCOPED_TRACE(::testing::Message() << clean.spec << ", input " << static_cast<int>(bad.where) << " row "
                                        << bad.row);
      AttentionCase c = clean;
      poison(c, bad);
      const auto query = [&](int64_t i) { return reaches_query(c, bad, i); };
      const auto key = [&](int64_t j) { return reaches_key(c, bad, j); };
      bool kept = false;
      for (int64_t i = 0; i < c.spec.q_len; ++i) kept = kept || query(i);
      if (bad.where != Where::kDout) {
        const ForwardResult got = run_forward(c, kernels, {.parallel = &pool_});
        expect_untouched("out", got.out, want.out, kept, query);
        expect_untouched("lse", got.lse, want.lse, false, query);
      }
      const BackwardResult got = run_backward(c, kernels, {.parallel = &pool_});
      expect_untouched("dq", got.dq, want_grads.dq, kept, query);
      // Few keys are met by no bad query of the scattered mask, and none by one that sees all keys.
      if (c.spec.mask == MaskKind::kWindow || c.spec.mask == MaskKind::kCausal) {
        expect_untouched("dk", got.dk, want_grads.dk, kept, key);
        expect_untouched("dv", got.dv, want_grads.dv, false, key);
      }
    }
  }

 private:
  ThreadPool pool_{2};
};

TEST_P(AttentionNanTest, BadValuesReachOnlyTheRowsThatKeepThem) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const MaskKind mask : {MaskKind::kCausal, MaskKind::kWindow, MaskKind::kScattered}) {
      if (GetParam().is_slow && (mask != MaskKind::kWindow || dtype == DType::kF16)) continue;
      expect_contained(
          AttentionCase({.dtype = dtype, .q_heads = 2, .kv_heads = 1, .q_len = 260, .kv_len = 300, .mask = mask}),
          kBad);
    }
  }
}

// Few queries take a way of their own. Row i keeps the keys up to 700 - 4 + i.
TEST_P(AttentionNanTest, BadValuesReachOnlyTheRowsThatKeepThemInDecoding) {
  constexpr Bad kLate[] = {{Where::kK, 699, kNan}, {Where::kK, 698, kInfinity}, {Where::kV, 699, -kInfinity},
                           {Where::kV, 698, kNan}, {Where::kQ, 1, kNan},        {Where::kDout, 2, kInfinity}};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    expect_contained(
        AttentionCase(
            {.dtype = dtype, .q_heads = 4, .kv_heads = 2, .q_len = 4, .kv_len = 700, .mask = MaskKind::kBottomRight}),
        kLate);
  }
}

// Where workers pack keys for themselves (kernel/narrow_call.cc).
TEST_P(AttentionNanTest, BadValuesReachOnlyTheRowsThatKeepThemInNarrowMasks) {
  if (GetParam().is_slow || kIsSanitized) GTEST_SKIP() << "minutes";
  constexpr Bad kFew[] = {{Where::kK, 133, kNan}, {Where::kV, 777, kNan}, {Where::kV, 1490, -kInfinity}};
  expect_contained(AttentionCase({.dtype = DType::kF32,
                                  .q_heads = 4,
                                  .kv_heads = 2,
                                  .q_len = 1500,
                                  .kv_len = 1500,
                                  .qk_dim = 768,
                                  .v_dim = 750,
                                  .mask = MaskKind::kWindow}),
                   kFew);
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionNanTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace ringspan::test
