// Four ranks as threads of this process: causal attention over a sequence that they share, forward and backward,
// compared with one rank that holds everything.
#include <array>
#include <cstdio>

#include "sequence.h"

int main() {
  constexpr int64_t kRanks = 4;
  const ringspan::Plan plan = causal_plan(kRanks);
  std::array<float, kRanks> differences{};
  std::array<long long, kRanks> sent{};

  ringspan::inproc::run_ranks(kRanks, [&](ringspan::Transport& transport) {
    const int64_t rank = transport.rank();
    const Results results = attend(plan, transport);
    sent[rank] = transport.counters().bytes_sent;
    differences[rank] = difference_from_one_rank(results, plan.q_map().positions(rank));
  });

  bool is_good = true;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    const bool is_close = differences[rank] < 1e-4f;
    is_good = is_good && is_close;
    std::printf("rank %d holds %d of %d tokens, sent %lld bytes: %s\n", int(rank), int(plan.q_map().local_rows(rank)),
                int(kTokens), sent[rank], is_close ? "equal to one rank" : "DIFFERS from one rank");
  }
  return is_good ? 0 : 1;
}
