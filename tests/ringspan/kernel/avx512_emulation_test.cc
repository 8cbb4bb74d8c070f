// The AVX-512 kernel text on machines without AVX-512: a target of all kernel tests where the build emulates it and the
// CPU lacks the real one, so that nothing is tested twice.
#ifdef RINGSPAN_EMULATE_AVX512

#include <algorithm>

#include <gtest/gtest.h>

#include "ringspan/kernel/call_support.h"

#include "tests/ringspan/support/attention_case.h"

namespace ringspan {

namespace emulated_avx512_bf16 {
kernel::IsaKernels kernels();
}

namespace test {
namespace {

bool offers(Isa isa) {
  const std::vector<Isa> available = available_isas();
  return std::find(available.begin(), available.end(), isa) != available.end();
}

// The emulation itself is compiled for AVX2.
bool is_needed() { return offers(Isa::kAvx2) && !offers(Isa::kAvx512Bf16); }

const kernel::KernelTable& table_for(DType dtype, bool has_bf16_dot) {
  const kernel::IsaKernels kernels = emulated_avx512_bf16::kernels();
  if (dtype == DType::kF64) return *kernels.f64;
  return dtype == DType::kBF16 && has_bf16_dot ? *kernels.bf16 : *kernels.f32;
}

Kernels emulated_kernels(bool has_bf16_dot) {
  return {[=](const ForwardArgs& args, Workspace& workspace, const Parallel& parallel) {
            kernel::run_forward(args, {table_for(args.q.dtype, has_bf16_dot), workspace, parallel});
          },
          [=](const BackwardArgs& args, Workspace& workspace, const Parallel& parallel) {
            kernel::run_backward(args, {table_for(args.q.dtype, has_bf16_dot), workspace, parallel});
          }};
}

const bool kIsAdded = [] {
  if (is_needed()) added_targets().push_back({"emulated_avx512_bf16", emulated_kernels(true), true});
  return is_needed();
}();

// Plain AVX-512 widens bf16 to fp32 and leaves the rest to the fp32 kernels, which the target above tests.
TEST(EmulatedAvx512Test, WidensBf16) {
  if (!kIsAdded) GTEST_SKIP() << "the real kernels are tested instead";
  for (const int64_t dim : {64, 33}) {
    const auto c = make_case({.dtype = DType::kBF16,
                              .q_heads = 2,
                              .kv_heads = 1,
                              .q_len = 100,
                              .kv_len = 150,
                              .qk_dim = dim,
                              .v_dim = dim,
                              .mask = MaskKind::kBottomRight});
    expect_accurate(*c, run_forward(*c, emulated_kernels(false)));
    expect_accurate(*c, run_backward(*c, emulated_kernels(false)));
  }
}

TEST(EmulatedAvx512Test, RowDelta) {
  if (!kIsAdded) GTEST_SKIP() << "the real kernels are tested instead";
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    const auto c = make_case({.dtype = dtype, .q_len = 20, .kv_len = 30, .v_dim = 37});
    const DType wide = accumulator_of(dtype);
    const Tensor out(rounded(c->want.out, dtype), dtype), dout(c->dout, dtype), dlse(c->dlse, wide);
    Tensor delta(wide, c->dlse.size);
    table_for(wide, false)
        .row_delta({kernel::raw_view(out.view()), kernel::raw_view(dout.view()), kernel::raw_view(dlse.view()),
                    kernel::raw_view(delta.view())},
                   0, 0, 0, 20);
    const Array rounded_out = out.array();
    Array want(c->dlse.size);
    for_each_index(rounded_out.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
      want.at(b, n, s) += rounded_out.at(b, n, s, d) * c->dout.at(b, n, s, d) - (d == 0 ? c->dlse.at(b, n, s) : 0);
    });
    EXPECT_LE(max_error(delta.array(), want), dtype == DType::kF64 ? 1e-13 : 1e-6);
  }
}

}  // namespace
}  // namespace test
}  // namespace ringspan

#endif  // RINGSPAN_EMULATE_AVX512
