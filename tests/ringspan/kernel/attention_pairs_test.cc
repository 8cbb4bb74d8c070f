// PairInputs: softcap, bias, boolean mask, slopes and dropout, against the oracle, forward and backward.
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/base/philox.h"
#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/attention_case.h"
#include "tests/ringspan/support/sanitized.h"

namespace ringspan::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Global positions of local rows, out of the tiles; -1 where no tile covers a row.
struct Positions {
  std::vector<int64_t> q, kv;
};
Positions positions_of(const std::vector<Tile>& tiles, int64_t q_len, int64_t kv_len) {
  Positions positions{std::vector<int64_t>(q_len, -1), std::vector<int64_t>(kv_len, -1)};
  for (const Tile& tile : tiles) {
    for (int64_t a = 0; a < tile.q_rows; ++a) positions.q[tile.q_row0 + a] = tile.q_pos0 + a * tile.q_stride;
    for (int64_t c = 0; c < tile.kv_rows; ++c) positions.kv[tile.kv_row0 + c] = tile.kv_pos0 + c * tile.kv_stride;
  }
  return positions;
}

enum class Term { kSoftcap, kBias, kSharedBias, kRowBias, kMask, kSharedMask, kSlopes, kRootSlopes, kDropout, kAll };
constexpr Term kAllTerms[] = {Term::kSoftcap,    Term::kBias,   Term::kSharedBias, Term::kRowBias, Term::kMask,
                              Term::kSharedMask, Term::kSlopes, Term::kRootSlopes, Term::kDropout, Term::kAll};
const char* name_of(Term term) {
  constexpr const char* kNames[] = {"softcap",     "bias",   "shared_bias", "row_bias", "mask",
                                    "shared_mask", "slopes", "root_slopes", "dropout",  "all"};
  return kNames[static_cast<int>(term)];
}

// A bias tensor and how it is shared.
struct Bias {
  Bias(DType dtype, std::array<int64_t, 4> full, std::array<bool, 3> shared, uint64_t seed) : size(full) {
    std::array<int64_t, 4> own = full;
    for (int axis = 0; axis < 3; ++axis) {
      if (shared[axis]) own[axis] = 1;
    }
    values = random_array(seed, own, dtype);
    // Some pairs masked; the first row of head 0 as a whole.
    for_each_index(own, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
      if ((s * 7 + d * 3 + n + b) % 11 == 0 || (s == 0 && n == 0 && own[2] > 1)) values.at(b, n, s, d) = -kInfinity;
    });
    tensor = Tensor(values, dtype);
    gradient = Tensor(accumulator_of(dtype), own);
  }

  double at(int64_t b, int64_t n, int64_t s, int64_t d) const {
    return values.at(b % values.size[0], n % values.size[1], s % values.size[2], d);
  }
  template <class View>
  View expanded(View view) const {
    for (int axis = 0; axis < 3; ++axis) {
      if (values.size[axis] == 1 && size[axis] != 1) view.stride[axis] = 0;
    }
    view.size = size;
    return view;
  }

  std::array<int64_t, 4> size;
  Array values;
  Tensor tensor, gradient;
};

// A case, and what the product is given beside it.
struct PairCase {
  PairCase(const CaseSpec& spec, Term term_, DType bias_dtype) : term(term_) {
    const Mask mask = make_mask(spec.mask, spec.batch, spec.q_len, spec.kv_len);
    positions = positions_of(mask.tiles, spec.q_len, spec.kv_len);
    int64_t columns = 1;
    for (const int64_t at : positions.kv) columns = std::max(columns, at + 1);
    const std::array<int64_t, 4> full{spec.batch, spec.q_heads, spec.q_len, columns};
    add_scores(spec, full, bias_dtype);
    if (has(Term::kDropout)) add_dropout(full);
    pairs.grids = std::span(&grid, 1);
    test_case = std::make_unique<AttentionCase>(spec, terms);
  }
  PairCase(const PairCase&) = delete;

  bool has(Term one) const { return term == one || term == Term::kAll; }

  void add_scores(const CaseSpec& spec, const std::array<int64_t, 4>& full, DType bias_dtype) {
    if (has(Term::kSoftcap)) terms.softcap = pairs.numbers.softcap = 1.5;
    if (has(Term::kBias) || term == Term::kSharedBias || term == Term::kRowBias) {
      const std::array<bool, 3> shared{term == Term::kSharedBias, term == Term::kSharedBias, term == Term::kRowBias};
      bias = std::make_unique<Bias>(bias_dtype, full, shared, 91);
      pairs.bias = bias->expanded(std::as_const(bias->tensor).view());
      pairs.bias_factor = 0.75;
    }
    if (has(Term::kMask) || term == Term::kSharedMask) {
      const bool shared = term == Term::kSharedMask;
      const std::array<int64_t, 4> own{shared ? 1 : full[0], shared ? 1 : full[1], full[2], full[3]};
      mask_bytes.resize(own[0] * own[1] * own[2] * own[3]);
      for (size_t i = 0; i < mask_bytes.size(); ++i) mask_bytes[i] = std::byte(i * 2654435761U >> 7 & 1);
      mask_stride = {shared ? 0 : own[1] * own[2] * own[3], shared ? 0 : own[2] * own[3], own[3], 1};
      pairs.mask = {mask_bytes.data(), full, mask_stride, /*masked_value=*/shared};
    }
    if (has(Term::kSlopes) || term == Term::kRootSlopes) {
      slopes = random_array(92, {1, full[1], 1, 1}, DType::kF32);
      // Small, as slopes are: scores of hundreds lose digits of their own (docs/maths.md).
      for (double& slope : slopes.data) slope = rounded(0.05 * slope, DType::kF32);
      slope_tensor = Tensor(slopes, accumulator_of(spec.dtype));
      pairs.slopes = std::as_const(slope_tensor).view();
      pairs.slopes.size[0] = full[0];
      pairs.slopes.stride[0] = 0;
      pairs.slope_shift = 2;
      pairs.slope_of_root = term == Term::kRootSlopes;
    }
    grid.q_begin = 0;
    grid.kv_begin = 0;
    terms.bias = [this](int64_t b, int64_t n, int64_t i, int64_t j) { return bias_at(b, n, i, j); };
  }

  double bias_at(int64_t b, int64_t n, int64_t i, int64_t j) const {
    const int64_t at = positions.kv[j];
    double sum = bias ? 0.75 * bias->at(b, n, i, at) : 0;
    if (!mask_bytes.empty()) {
      const int64_t index = b * mask_stride[0] + n * mask_stride[1] + i * mask_stride[2] + at;
      if ((mask_bytes[index] != std::byte{0}) == pairs.mask.masked_value) return -kInfinity;
    }
    if (!slopes.data.empty()) {
      const double distance = std::abs(static_cast<double>(at - positions.q[i] + 2));
      sum -= slopes.at(0, n, 0) * (pairs.slope_of_root ? std::sqrt(distance) : distance);
    }
    return sum;
  }

  void add_dropout(const std::array<int64_t, 4>& full) {
    int64_t rows = 1;
    for (const int64_t at : positions.q) rows = std::max(rows, at + 1);
    // An origin that is no multiple of 4, and indices beyond 32 bits.
    grid.origin = 0x100000003;
    grid.row_stride = full[3];
    grid.head_stride = static_cast<uint64_t>(rows * full[3]);
    grid.batch_stride = static_cast<uint64_t>(full[1]) * grid.head_stride;
    pairs.dropout = {0.3, 0x123456789abcdef, 0x1000000005};
    terms.dropout_p = 0.3;
    terms.is_dropped = [this](int64_t b, int64_t n, int64_t i, int64_t j) {
      const uint64_t index = grid.origin + b * grid.batch_stride + n * grid.head_stride +
                             positions.q[i] * grid.row_stride + positions.kv[j];
      return draw_of_pair(pairs.dropout.seed, pairs.dropout.offset, index) >= keep_threshold(0.3);
    };
  }

  void expect_dbias() const {
    if (!bias) return;
    Array want(bias->values.size);
    const Array& ds = test_case->want_grads.ds;
    for_each_index(ds.size, [&](int64_t b, int64_t n, int64_t i, int64_t j) {
      if (positions.kv[j] < 0 || ds.at(b, n, i, j) == 0) return;
      want.at(b % want.size[0], n % want.size[1], i % want.size[2], positions.kv[j]) += 0.75 * ds.at(b, n, i, j);
    });
    const DType dtype = test_case->spec.dtype;
    const double tolerance = dtype == DType::kF64 ? 1e-12 : dtype == DType::kF32 ? 5e-5 : 1e-4;
    EXPECT_LE(max_error(bias->gradient.array(), want), tolerance) << "dbias";
  }

  Term term;
  Positions positions;
  PairTerms terms;
  PairInputs pairs;
  PairGrid grid{};
  std::unique_ptr<Bias> bias;
  std::vector<std::byte> mask_bytes;
  std::array<int64_t, 4> mask_stride{};
  Array slopes;
  Tensor slope_tensor;
  std::unique_ptr<AttentionCase> test_case;
};

CaseSpec spec_of(DType dtype, int64_t q_len, MaskKind mask) {
  return {.dtype = dtype,
          .batch = 2,
          .q_heads = 4,
          .kv_heads = 2,
          .q_len = q_len,
          .kv_len = 230,
          .qk_dim = 24,
          .v_dim = 17,
          .mask = mask};
}

class AttentionPairsTest : public ::testing::TestWithParam<Target> {
 protected:
  Kernels kernels() const { return GetParam().kernels; }

  void expect_right(const CaseSpec& spec, Term term, DType bias_dtype) {
    SCOPED_TRACE(::testing::Message() << spec << " " << name_of(term));
    PairCase c(spec, term, bias_dtype);
    for (const int64_t num_calls : {1, 3}) {
      expect_accurate(*c.test_case, run_forward(*c.test_case, kernels(), {.num_calls = num_calls, .pairs = c.pairs}));
      if (c.bias) c.bias->gradient = Tensor(accumulator_of(spec.dtype), c.bias->values.size);
      const TensorView dbias = c.bias ? c.bias->expanded(c.bias->gradient.view()) : TensorView{};
      expect_accurate(*c.test_case, run_backward(*c.test_case, kernels(),
                                                 {.num_calls = num_calls, .pairs = c.pairs, .dbias = dbias}));
      c.expect_dbias();
    }
  }
};

constexpr MaskKind kMasks[] = {MaskKind::kFull,    MaskKind::kCausal, MaskKind::kWindow, MaskKind::kDocuments,
                               MaskKind::kStrided, MaskKind::kSplit,  MaskKind::kPartial};

TEST_P(AttentionPairsTest, EveryTermOnEveryMask) {
  int64_t number = 0;
  for (const Term term : kAllTerms) {
    for (const MaskKind mask : kMasks) {
      if (GetParam().is_slow && mask != MaskKind::kStrided && mask != MaskKind::kCausal) continue;
      if (!runs_case(number++, 3)) continue;
      expect_right(spec_of(DType::kF32, 110, mask), term, DType::kF32);
    }
  }
}

TEST_P(AttentionPairsTest, EveryTermInEveryDtype) {
  for (const Term term : kAllTerms) {
    for (const DType dtype : {DType::kF64, DType::kBF16, DType::kF16}) {
      expect_right(spec_of(dtype, 70, MaskKind::kCausal), term, dtype);
    }
  }
  expect_right(spec_of(DType::kBF16, 70, MaskKind::kCausal), Term::kAll, DType::kF32);
  expect_right(spec_of(DType::kF64, 70, MaskKind::kCausal), Term::kAll, DType::kF32);
}

// Few rows take a path of their own.
TEST_P(AttentionPairsTest, EveryTermWithFewRows) {
  for (const Term term : kAllTerms) {
    for (const int64_t q_len : {1, 3}) {
      for (const MaskKind mask : {MaskKind::kFull, MaskKind::kBottomRight, MaskKind::kScattered}) {
        expect_right(spec_of(DType::kF32, q_len, mask), term, DType::kF32);
      }
      expect_right(spec_of(DType::kF16, q_len, MaskKind::kWindow), term, DType::kF16);
    }
  }
}

TEST_P(AttentionPairsTest, TheSameBitsOnAnyNumberOfThreads) {
  PairCase c(spec_of(DType::kF32, 110, MaskKind::kCausal), Term::kAll, DType::kF32);
  const auto forward = [&](const Parallel& parallel) {
    return run_forward(*c.test_case, kernels(), {.parallel = &parallel, .pairs = c.pairs});
  };
  const auto backward = [&](const Parallel& parallel) {
    return run_backward(*c.test_case, kernels(), {.parallel = &parallel, .pairs = c.pairs});
  };
  expect_same(forward(Serial()), forward(ThreadPool(3)));
  expect_same(backward(Serial()), backward(ThreadPool(3)));
}

// A key that holds NaN or inf, masked pair by pair: nobody sees it.
TEST_P(AttentionPairsTest, WhatIsMaskedMayHoldAnything) {
  for (const int64_t q_len : {40, 2}) {
    CaseSpec spec{.q_heads = 2, .kv_heads = 1, .q_len = q_len, .kv_len = 60, .qk_dim = 16, .v_dim = 16};
    PairTerms terms;
    terms.bias = [](int64_t, int64_t, int64_t, int64_t j) { return j % 5 == 2 ? -kInfinity : 0.0; };
    AttentionCase c(spec, terms);
    for_each_index(c.inputs.k.size, [&](int64_t b, int64_t n, int64_t j, int64_t d) {
      if (j % 5 != 2) return;
      c.inputs.k.at(b, n, j, d) = d == 3 ? kInfinity : std::nan("");
      c.inputs.v.at(b, n, j, d) = d == 2 ? -kInfinity : std::nan("");
    });
    Array values({1, 1, 1, 60});
    std::vector<std::byte> bytes(60);
    for (int64_t j = 0; j < 60; ++j) {
      values.at(0, 0, 0, j) = j % 5 == 2 ? -kInfinity : 0;
      bytes[j] = std::byte(j % 5 == 2);
    }
    const Tensor bias(values, DType::kF32);
    PairInputs by_bias, by_mask;
    by_bias.bias = bias.view();
    by_bias.bias.size = {1, 2, q_len, 60};
    by_bias.bias.stride = {0, 0, 0, 1};
    by_mask.mask = {bytes.data(), {1, 2, q_len, 60}, {0, 0, 0, 1}, true};
    for (const PairInputs& pairs : {by_bias, by_mask}) {
      expect_accurate(c, run_forward(c, kernels(), {.pairs = pairs}));
      expect_accurate(c, run_backward(c, kernels(), {.pairs = pairs}));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, AttentionPairsTest, ::testing::ValuesIn(all_targets()),
                         [](const auto& param) { return param.param.name; });

// Given, though there is nothing to point at: no query rows, or no keys.
TEST_P(AttentionPairsTest, TensorsWithoutElementsNeedNoPointer) {
  for (const auto& [q_len, kv_len] : {std::pair<int64_t, int64_t>{0, 30}, {30, 0}}) {
    const AttentionCase c({.q_heads = 2, .kv_heads = 1, .q_len = q_len, .kv_len = kv_len});
    const std::array<int64_t, 4> size{1, 2, q_len, kv_len};
    PairInputs pairs;
    pairs.bias = view_of(static_cast<const void*>(nullptr), DType::kF32, Layout::kBNSD, size);
    pairs.mask = {nullptr, size, {0, 0, kv_len, 1}, true};
    const TensorView dbias = view_of(static_cast<void*>(nullptr), DType::kF32, Layout::kBNSD, size);
    expect_accurate(c, run_forward(c, kernels(), {.pairs = pairs}));
    expect_accurate(c, run_backward(c, kernels(), {.pairs = pairs, .dbias = dbias}));
  }
}

TEST_P(AttentionPairsTest, RefusesElementsWithoutAPointer) {
  // What is emulated is called past the checks.
  if (GetParam().is_slow) GTEST_SKIP();
  const AttentionCase c({.q_heads = 2, .kv_heads = 1, .q_len = 4, .kv_len = 4});
  PairInputs bias, mask, slopes;
  bias.bias = {nullptr, DType::kF32, {1, 2, 4, 4}, {0, 0, 0, 1}};
  mask.mask = {nullptr, {1, 2, 4, 4}, {0, 0, 0, 1}};
  slopes.slopes = {nullptr, DType::kF32, {1, 2, 1, 1}, {0, 0, 0, 0}};
  for (const PairInputs& pairs : {bias, mask, slopes}) {
    EXPECT_THROW(run_forward(c, kernels(), {.pairs = pairs}), Error);
    EXPECT_THROW(run_backward(c, kernels(), {.pairs = pairs}), Error);
  }
}

TEST(AttentionPairsReferenceTest, TheReferenceKnowsThemToo) {
  for (const Term term : kAllTerms) {
    PairCase c({.dtype = DType::kF64,
                .batch = 2,
                .q_heads = 2,
                .kv_heads = 1,
                .q_len = 12,
                .kv_len = 20,
                .mask = MaskKind::kStrided},
               term, DType::kF64);
    SCOPED_TRACE(name_of(term));
    const TensorView dbias = c.bias ? c.bias->expanded(c.bias->gradient.view()) : TensorView{};
    expect_accurate(*c.test_case, run_forward(*c.test_case, reference_kernels(), {.num_calls = 2, .pairs = c.pairs}));
    expect_accurate(*c.test_case, run_backward(*c.test_case, reference_kernels(), {.pairs = c.pairs, .dbias = dbias}));
    c.expect_dbias();
  }
}

}  // namespace
}  // namespace ringspan::test
