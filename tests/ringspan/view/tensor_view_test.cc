#include "ringspan/view/tensor_view.h"

#include <numeric>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

#include "tests/ringspan/support/array.h"
#include "tests/ringspan/support/tensor.h"

namespace ringspan {
namespace {

constexpr std::array<int64_t, 4> kSize{2, 3, 5, 4};  // batch, heads, rows, dim
constexpr Layout kLayouts[] = {Layout::kBNSD, Layout::kBSND, Layout::kBSH, Layout::kSBH};

float element(const ConstTensorView& view, int64_t b, int64_t n, int64_t s, int64_t d) {
  return reinterpret_cast<const float*>(view.data)[view.offset(b, n, s, d)];
}

TEST(TensorViewTest, EachLayoutCoversItsMemoryOnce) {
  std::vector<float> memory(2 * 3 * 5 * 4);
  for (const Layout layout : kLayouts) {
    const TensorView view = view_of(memory.data(), DType::kF32, layout, kSize);
    EXPECT_EQ(view.num_elements(), 120);
    std::set<int64_t> seen;
    test::for_each_index(kSize,
                         [&](int64_t b, int64_t n, int64_t s, int64_t d) { seen.insert(view.offset(b, n, s, d)); });
    EXPECT_EQ(seen.size(), 120u) << name_of(layout);
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), 119);
  }
}

// The element [b=1, n=2, s=3, d=1], its index written out for the sizes above.
TEST(TensorViewTest, LayoutsAgreeWithTheirNames) {
  std::vector<float> memory(120);
  std::iota(memory.begin(), memory.end(), 0.0F);
  const void* data = memory.data();
  EXPECT_EQ(element(view_of(data, DType::kF32, Layout::kBNSD, kSize), 1, 2, 3, 1), ((1 * 3 + 2) * 5 + 3) * 4 + 1);
  EXPECT_EQ(element(view_of(data, DType::kF32, Layout::kBSND, kSize), 1, 2, 3, 1), ((1 * 5 + 3) * 3 + 2) * 4 + 1);
  EXPECT_EQ(element(view_of(data, DType::kF32, Layout::kBSH, kSize), 1, 2, 3, 1), (1 * 5 + 3) * 12 + 2 * 4 + 1);
  EXPECT_EQ(element(view_of(data, DType::kF32, Layout::kSBH, kSize), 1, 2, 3, 1), (3 * 2 + 1) * 12 + 2 * 4 + 1);
}

TEST(TensorViewTest, RowPointsAtTheFirstElement) {
  std::vector<uint16_t> memory(120);
  const TensorView view = view_of(memory.data(), DType::kBF16, Layout::kSBH, kSize);
  EXPECT_EQ(view.row(1, 2, 3), reinterpret_cast<std::byte*>(memory.data() + (3 * 2 + 1) * 12 + 2 * 4));
}

TEST(TensorViewTest, StatsHaveOneElementPerRow) {
  std::vector<double> memory(30);
  const TensorView view = stats_view(memory.data(), DType::kF64, 2, 3, 5);
  EXPECT_EQ(view.size, (std::array<int64_t, 4>{2, 3, 5, 1}));
  EXPECT_EQ(view.offset(1, 2, 4), 29);
}

TEST(TensorViewTest, CopyConvertsBetweenTypesAndLayouts) {
  const test::Array values = test::random_array(1, kSize, DType::kF32);
  const DType dtypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  for (const DType from_dtype : dtypes) {
    for (const DType to_dtype : dtypes) {
      for (const Layout layout : kLayouts) {
        const test::Array source = test::rounded(values, from_dtype);
        const test::Tensor from(source, from_dtype, test::order_of(layout), 2);
        test::Tensor to(to_dtype, kSize, {3, 1, 0, 2}, 1, 99);
        copy(from.view(), to.view());
        EXPECT_EQ(to.array().data, test::rounded(source, to_dtype).data);
      }
    }
  }
}

TEST(TensorViewTest, CopyLeavesTheGapsAlone) {
  test::Tensor to(DType::kF32, {1, 1, 2, 3}, {0, 1, 2, 3}, 2, 7);
  copy(test::Tensor(test::Array({1, 1, 2, 3}, 1), DType::kF32).view(), to.view());
  const auto* memory = reinterpret_cast<const float*>(to.bytes().data());
  for (int i = 0; i < 12; ++i) EXPECT_EQ(memory[i], i % 2 == 0 ? 1.0F : 7.0F);
}

TEST(TensorViewTest, CopyReadsExpandedInputs) {
  float value = 3;
  const ConstTensorView expanded{reinterpret_cast<const std::byte*>(&value), DType::kF32, kSize, {0, 0, 0, 0}};
  test::Tensor to(DType::kF32, kSize);
  copy(expanded, to.view());
  EXPECT_EQ(to.array().data, std::vector<double>(120, 3.0));
}

TEST(TensorViewTest, AddsInTheAccumulatorTypes) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const test::Array a = test::random_array(2, kSize, dtype), b = test::random_array(3, kSize, dtype);
    test::Tensor to(a, dtype, {2, 0, 1, 3});
    add(test::Tensor(b, dtype, {3, 2, 1, 0}).view(), to.view());
    const test::Array sum = to.array();
    for (std::size_t i = 0; i < sum.data.size(); ++i) {
      EXPECT_EQ(sum.data[i], test::rounded(a.data[i] + b.data[i], dtype));
    }
  }
}

TEST(TensorViewTest, ZeroFillsTheViewOnly) {
  test::Tensor tensor(DType::kF32, {1, 2, 3, 4}, {0, 1, 2, 3}, 2, 5);
  fill_zero(tensor.view());
  const auto* memory = reinterpret_cast<const float*>(tensor.bytes().data());
  for (int i = 0; i < 48; ++i) EXPECT_EQ(memory[i], i % 2 == 0 ? 0.0F : 5.0F);
}

TEST(TensorViewTest, RefusesOtherSizesAndNarrowSums) {
  test::Tensor a(DType::kF32, {1, 2, 3, 4}), b(DType::kF32, {1, 2, 5, 4}), narrow(DType::kBF16, {1, 2, 3, 4});
  for (const auto& act : {copy, add}) {
    try {
      act(a.view(), b.view());
      FAIL() << "three rows went into five";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find('3'), std::string::npos);
      EXPECT_NE(std::string(error.what()).find('5'), std::string::npos);
    }
  }
  EXPECT_THROW(add(narrow.view(), narrow.view()), Error);
}

// What is given is a flag, not a pointer: a tensor without elements may have none.
TEST(TensorViewTest, AViewIsGivenWhateverItsPointer) {
  const TensorView none, empty = view_of(static_cast<void*>(nullptr), DType::kF32, Layout::kBNSD, {2, 3, 0, 4});
  EXPECT_FALSE(none.is_given());
  EXPECT_FALSE(ConstTensorView(none).is_given());
  EXPECT_FALSE(narrow(none, 1, 1, 2).is_given());
  EXPECT_TRUE(empty.is_given());
  EXPECT_TRUE(ConstTensorView(empty).is_given());
  EXPECT_TRUE(narrow(empty, 1, 1, 2).is_given());
  EXPECT_EQ(narrow(empty, 1, 1, 2).data, nullptr);
  EXPECT_TRUE(stats_view(nullptr, DType::kF32, 2, 3, 0).is_given());
  check_made("none", none);
  check_made("empty", empty);
}

TEST(TensorViewTest, RefusesElementsWithoutDataAndViewsFilledByHand) {
  std::byte memory{};
  TensorView by_hand, sized;
  by_hand.data = &memory;
  sized.size = {2, 3, 0, 4};
  EXPECT_THROW(check_made("by_hand", by_hand), Error);
  EXPECT_THROW(check_made("sized", sized), Error);
  EXPECT_THROW(check_made("no data", view_of(static_cast<void*>(nullptr), DType::kF32, Layout::kBNSD, {1, 1, 1, 1})),
               Error);
}

TEST(TensorViewTest, EmptyViewsAreFine) {
  test::Tensor a(DType::kF32, {2, 3, 0, 4}), b(DType::kF32, {2, 3, 0, 4});
  copy(a.view(), b.view());
  add(a.view(), b.view());
  fill_zero(b.view());
  EXPECT_EQ(b.view().num_elements(), 0);
}

}  // namespace
}  // namespace ringspan
