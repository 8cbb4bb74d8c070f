#include <cmath>

#include <gtest/gtest.h>

#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/array.h"
#include "tests/ringspan/support/tensor.h"

namespace ringspan::test {
namespace {

Array expected_delta(const Array& out, const Array& dout, const Array& dlse) {
  Array delta({out.size[0], out.size[1], out.size[2], 1});
  for_each_index(out.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    delta.at(b, n, s) += out.at(b, n, s, d) * dout.at(b, n, s, d);
  });
  if (dlse.data.empty()) return delta;
  for (std::size_t i = 0; i < delta.data.size(); ++i) delta.data[i] -= dlse.data[i];
  return delta;
}

// Products of narrow inputs are exact in fp32, so one bound serves all but fp64.
TEST(RowDeltaTest, MatchesTheSum) {
  const ThreadPool pool(3);
  const Serial serial;
  for (const Isa isa : available_isas()) {
    force_isa(isa);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      const DType wide = accumulator_of(dtype);
      for (const int64_t dim : {1, 7, 16, 33, 128, 768}) {
        for (const int64_t rows : {0, 1, 33}) {
          const Array out = random_array(1, {2, 2, rows, dim}, dtype), dout = random_array(2, out.size, dtype),
                      dlse = random_array(3, {2, 2, rows, 1}, wide);
          Array bits;
          for (const auto& [order, gap] : {std::pair<std::array<int, 4>, int64_t>{{0, 1, 2, 3}, 1},
                                           {order_of(Layout::kSBH), 1},
                                           {{3, 1, 2, 0}, 2}}) {
            const Tensor out_tensor(out, dtype, order, gap), dout_tensor(dout, dtype, order, gap),
                dlse_tensor(dlse, wide, order, gap);
            Tensor delta(wide, dlse.size, order, gap, NAN);
            row_delta(out_tensor.view(), dout_tensor.view(), dlse_tensor.view(), delta.view(), serial);
            EXPECT_LE(max_error(delta.array(), expected_delta(out, dout, dlse)), dtype == DType::kF64 ? 1e-13 : 1e-6);
            if (bits.data.empty()) bits = delta.array();
            EXPECT_EQ(delta.array().data, bits.data) << "the layout changed the bits";
            row_delta(out_tensor.view(), dout_tensor.view(), dlse_tensor.view(), delta.view(), pool);
            EXPECT_EQ(delta.array().data, bits.data) << "the threads changed the bits";
            row_delta(out_tensor.view(), dout_tensor.view(), {}, delta.view(), pool);
            EXPECT_LE(max_error(delta.array(), expected_delta(out, dout, {})), dtype == DType::kF64 ? 1e-13 : 1e-6);
          }
        }
      }
    }
  }
  force_isa(std::nullopt);
}

}  // namespace
}  // namespace ringspan::test
