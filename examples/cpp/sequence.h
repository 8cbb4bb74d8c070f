// What the examples share: one rank's rows of a sequence, and a call on them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ringspan/ringspan.h"

constexpr int64_t kTokens = 1000, kHeads = 8, kKvHeads = 2, kDim = 64;

// A tensor [tokens, heads, dim] in memory of its own. The library sees it as [batch 1, heads, tokens, dim].
struct Rows {
  Rows(int64_t tokens, int64_t heads, int64_t dim)
      : tokens(tokens), heads(heads), dim(dim), values(static_cast<size_t>(tokens * heads * dim)) {}
  ringspan::TensorView view() {
    return view_of(values.data(), ringspan::DType::kF32, ringspan::Layout::kBSND, {1, heads, tokens, dim});
  }
  int64_t tokens, heads, dim;
  std::vector<float> values;
};

// The rows of some positions. A value depends on its position in the whole sequence, so each rank makes its own.
inline Rows made_up(const std::vector<int64_t>& positions, int64_t heads, int64_t which) {
  Rows rows(static_cast<int64_t>(positions.size()), heads, kDim);
  for (size_t i = 0; i < rows.values.size(); ++i) {
    const auto width = static_cast<size_t>(heads * kDim);
    const int64_t place = (positions[i / width] * 4 + which) * heads * kDim + static_cast<int64_t>(i % width);
    rows.values[i] = std::sin(static_cast<float>(place * 7919 % 100003));
  }
  return rows;
}

struct Results {
  Rows out, dq, dk, dv;
};

// Forward and backward of the transport's rank under `plan`.
inline Results attend(const ringspan::Plan& plan, ringspan::Transport& transport) {
  const std::vector<int64_t> positions = plan.q_map().positions(transport.rank());
  const auto tokens = static_cast<int64_t>(positions.size());
  Rows q = made_up(positions, kHeads, 0), k = made_up(positions, kKvHeads, 1), v = made_up(positions, kKvHeads, 2);
  Rows dout = made_up(positions, kHeads, 3), max(tokens, kHeads, 1), sum(tokens, kHeads, 1), lse(tokens, kHeads, 1);
  Results r{{tokens, kHeads, kDim}, {tokens, kHeads, kDim}, {tokens, kKvHeads, kDim}, {tokens, kKvHeads, kDim}};

  const ringspan::RankPlan part = plan.rank(transport.rank());
  const ringspan::OutputView output{.out = r.out.view(), .max = max.view(), .sum = sum.view(), .lse = lse.view()};
  ring_forward(part, transport, q.view(), k.view(), v.view(), output);
  ring_backward(part, transport, q.view(), k.view(), v.view(), output, dout.view(),
                {.dq = r.dq.view(), .dk = r.dk.view(), .dv = r.dv.view()});
  return r;
}

inline ringspan::Plan causal_plan(int64_t world) {
  const ringspan::Problem problem{.q_heads = kHeads,
                                  .kv_heads = kKvHeads,
                                  .q_len = kTokens,
                                  .kv_len = kTokens,
                                  .qk_dim = kDim,
                                  .v_dim = kDim,
                                  .scale = ringspan::default_scale(kDim)};
  const auto mask = ringspan::MaskSpec::causal(kTokens, kTokens, ringspan::Corner::kTopLeft);
  return build_plan(problem, mask, ringspan::ShardMap::head_tail(kTokens, world), ringspan::Schedule::kRing);
}

// The largest difference between rows of a rank and the same rows of the whole sequence.
inline float difference(const Rows& part, const Rows& whole, const std::vector<int64_t>& positions) {
  float most = 0;
  for (size_t i = 0; i < part.values.size(); ++i) {
    const auto width = static_cast<size_t>(part.heads * part.dim);
    const size_t place = static_cast<size_t>(positions[i / width]) * width + i % width;
    most = std::max(most, std::abs(part.values[i] - whole.values[place]));
  }
  return most;
}

// The same over out and all gradients, against a rank that holds everything.
inline float difference_from_one_rank(const Results& part, const std::vector<int64_t>& positions) {
  float most = 0;
  ringspan::inproc::run_ranks(1, [&](ringspan::Transport& alone) {
    const Results whole = attend(causal_plan(1), alone);
    for (Rows Results::* rows : {&Results::out, &Results::dq, &Results::dk, &Results::dv}) {
      most = std::max(most, difference(part.*rows, whole.*rows, positions));
    }
  });
  return most;
}
