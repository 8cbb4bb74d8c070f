#include "ringspan/kernel/call_support.h"

#include <algorithm>
#include <atomic>

#include "ringspan/base/philox.h"

namespace ringspan::kernel {

static_assert(static_cast<int>(Element::kF32) == static_cast<int>(DType::kF32));
static_assert(static_cast<int>(Element::kBF16) == static_cast<int>(DType::kBF16));
static_assert(static_cast<int>(Element::kF16) == static_cast<int>(DType::kF16));
static_assert(static_cast<int>(Element::kF64) == static_cast<int>(DType::kF64));

RawView raw_view(const ConstTensorView& view) {
  // A kernel takes a null pointer for an absent tensor. A given one without elements may have that too, and nothing is
  // lost: it has no rows, heads or batch entries, and no job would read it, or no columns, and no tile keeps a pair.
  RawView raw{};
  if (!view.is_given()) return raw;
  // The kernels write only through the views that a call names as outputs.
  raw.data = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(view.data));
  for (int i = 0; i < 4; ++i) raw.stride[i] = view.stride[i] * size_of(view.dtype);
  raw.dim = view.dim();
  raw.element = static_cast<Element>(view.dtype);
  return raw;
}

PairRule pair_rule(const PairInputs& pairs) {
  PairRule rule{};
  rule.changes_scores = pairs.changes_scores();
  rule.drops = pairs.drops();
  rule.scales_gradients = pairs.has_numbers();
  rule.numbers = pairs.numbers;
  rule.bias = raw_view(pairs.bias);
  rule.bias_factor = pairs.bias_factor;
  if (pairs.mask.is_given()) {
    rule.mask.data = reinterpret_cast<unsigned char*>(const_cast<std::byte*>(pairs.mask.data));
    std::copy(pairs.mask.stride.begin(), pairs.mask.stride.end(), rule.mask.stride);
  }
  rule.mask_value = pairs.mask.masked_value;
  rule.mask_by_grid = pairs.mask.rows_are_grids;
  rule.slopes = raw_view(pairs.slopes);
  rule.slope_shift = pairs.slope_shift;
  rule.slope_of_root = pairs.slope_of_root;
  rule.seed = pairs.dropout.seed;
  rule.offset = pairs.dropout.offset;
  rule.rescale = 1;
  if (pairs.drops()) {
    rule.threshold = keep_threshold(pairs.dropout.p);
    rule.rescale = 1 / (1 - pairs.dropout.p);
  }
  rule.grids = pairs.grids.data();
  rule.num_grids = static_cast<int64_t>(pairs.grids.size());
  return rule;
}

ForwardWave forward_wave(const ForwardArgs& args) {
  ForwardWave wave{};
  wave.q = raw_view(args.q);
  wave.k = raw_view(args.k);
  wave.v = raw_view(args.v);
  wave.state_max = raw_view(args.state.max);
  wave.state_sum = raw_view(args.state.sum);
  wave.state_acc = raw_view(args.state.acc);
  wave.out = raw_view(args.output.out);
  wave.out_max = raw_view(args.output.max);
  wave.out_sum = raw_view(args.output.sum);
  wave.out_lse = raw_view(args.output.lse);
  wave.sink = raw_view(args.sink);
  wave.pairs = pair_rule(args.pairs);
  // Else a kernel may apply the scale to masked scores, and -inf times 0 is NaN. (As fp32 it may be 0 where it isn't.)
  if (static_cast<float>(args.scale) == 0) wave.pairs.changes_scores = 1;
  wave.scale = args.scale;
  wave.kv_heads = args.k.heads();
  wave.heads_per_kv = args.q.heads() / args.k.heads();
  return wave;
}

const KernelTable& table_for(Isa isa, DType dtype) {
  const auto pick = [dtype](const IsaKernels& kernels) -> const KernelTable& {
    if (dtype == DType::kF64) return *kernels.f64;
    return dtype == DType::kBF16 && kernels.bf16 != nullptr ? *kernels.bf16 : *kernels.f32;
  };
  switch (isa) {
#ifdef RINGSPAN_ISA_X86
    case Isa::kAvx2: return pick(avx2::kernels());
#endif
#ifdef RINGSPAN_ISA_AVX512
    case Isa::kAvx512: return pick(avx512::kernels());
    case Isa::kAvx512Bf16: return pick(avx512_bf16::kernels());
#endif
    default: return pick(generic::kernels());
  }
}

int count_workers(const Parallel& parallel, int64_t scratch_bytes, double work) {
  // About 20 us of one core: less than waking a pool is worth.
  constexpr double kSmallWork = 1e6;
  if (work < kSmallWork) return 1;
  const int64_t fit = kScratchBytes / std::max<int64_t>(scratch_bytes, 1);
  return static_cast<int>(std::clamp<int64_t>(parallel.num_threads(), 1, std::max<int64_t>(fit, 1)));
}

void run_jobs(const Parallel& parallel, int num_workers, int64_t num_jobs, unsigned char* scratch,
              int64_t scratch_bytes, const std::function<void(int64_t, unsigned char*)>& job) {
  num_workers = static_cast<int>(std::min<int64_t>(num_workers, num_jobs));
  if (num_workers <= 1) {
    for (int64_t i = 0; i < num_jobs; ++i) job(i, scratch);
    return;
  }
  std::atomic<int64_t> next{0};
  parallel.run(num_workers, [&](int worker) {
    for (int64_t i = next.fetch_add(1); i < num_jobs; i = next.fetch_add(1)) job(i, scratch + worker * scratch_bytes);
  });
}

}  // namespace ringspan::kernel
