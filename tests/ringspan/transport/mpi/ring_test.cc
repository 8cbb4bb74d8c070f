// The ring over MPI: the bits of the in-process ranks, and the values of the oracle.
#include <gtest/gtest.h>

#include "ringspan/base/error.h"
#include "ringspan/transport/mpi/mpi.h"

#include "tests/ringspan/support/ring_cases.h"

namespace ringspan {
namespace {

using test::Array;
using test::MapCase;
using test::MaskCase;
using test::RankResults;
using test::Tensor;

constexpr int64_t kLength = 53;

std::vector<MaskCase> masks() {
  std::vector<int64_t> ids(kLength);
  for (int64_t i = 0; i < kLength; ++i) ids[i] = i % 9 == 4 ? 0 : 1 + i / 11;  // padding inside and between documents
  return {{"causal", MaskSpec::causal(kLength, kLength, Corner::kTopLeft),
           [](int64_t, int64_t i, int64_t j) { return j <= i; }},
          {"documents", documents_by_ids({ids}, {}),
           [ids](int64_t, int64_t i, int64_t j) { return ids[i] == ids[j] && ids[i] != 0 && j <= i; }}};
}

std::vector<MapCase> maps(int64_t world) {
  std::vector<int64_t> lengths(world, 0);  // rank 0 empty where there is another
  for (int64_t i = 0; i < kLength; ++i) ++lengths[world == 1 ? 0 : 1 + i * i % (world - 1)];
  return {{"head_tail", ShardMap::head_tail(kLength, world)}, {"uneven", ShardMap::from_lengths(lengths)}};
}

Problem problem_of(DType dtype) {
  Problem p{.batch = 2,
            .q_heads = 4,
            .kv_heads = 2,
            .q_len = kLength,
            .kv_len = kLength,
            .qk_dim = 24,
            .v_dim = 16,
            .dtype = dtype};
  p.scale = default_scale(p.qk_dim);
  return p;
}

template <class Body>
void for_each_result(const RankResults& results, const Body& body) {
  int place = 0;
  for (const Tensor* tensor :
       {&results.out, &results.max, &results.sum, &results.lse, &results.dq, &results.dk, &results.dv}) {
    body(place++, *tensor);
  }
}

void expect_same_bits(const RankResults& got, const RankResults& want) {
  std::vector<const Tensor*> others;
  for_each_result(want, [&](int, const Tensor& tensor) { others.push_back(&tensor); });
  for_each_result(
      got, [&](int i, const Tensor& tensor) { EXPECT_TRUE(tensor.bytes() == others[i]->bytes()) << "result " << i; });
}

// The rows of a global array that a rank holds.
Array rows_of(const Array& global, const ShardMap& map, int64_t rank) {
  const std::vector<int64_t> positions = map.positions(rank);
  Array local({global.size[0], global.size[1], static_cast<int64_t>(positions.size()), global.size[3]});
  test::for_each_index(local.size, [&](int64_t b, int64_t n, int64_t s, int64_t d) {
    local.at(b, n, s, d) = global.at(b, n, positions[s], d);
  });
  return local;
}

TEST(MpiRing, BitsOfTheInProcessRanksAndValuesOfTheOracle) {
  mpi::Endpoint endpoint(MPI_COMM_WORLD);
  const int64_t rank = endpoint.rank(), world = endpoint.world();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Problem p = problem_of(dtype);
    const test::RingInputs in = test::random_inputs(5, p);
    for (const MaskCase& mask : masks()) {
      const test::Expected expected = test::expected_of(p, in, mask.keep);
      const test::Outputs& want = expected.outputs;
      const test::Gradients& gradients = expected.gradients;
      for (const auto& [map_name, map] : maps(world)) {
        for (const Schedule& schedule : schedules_for(world)) {
          SCOPED_TRACE(
              concat(name_of(dtype), ", ", mask.name, ", ", map_name, ", ", name_of(schedule), ", rank ", rank));
          const Plan plan = build_plan(p, mask.mask, map, schedule);
          const Transport::Counters before = endpoint.counters();
          const RankResults got = test::run_rank(plan, in, endpoint);
          RankResults threads;
          Transport::Counters sent;
          inproc::run_ranks(world, [&](Transport& transport) {
            const RankResults result = test::run_rank(plan, in, transport);
            if (transport.rank() != rank) return;
            threads = result;
            sent = transport.counters();
          });
          expect_same_bits(got, threads);
          EXPECT_EQ(endpoint.counters().bytes_sent - before.bytes_sent, sent.bytes_sent);
          EXPECT_EQ(endpoint.counters().messages_sent - before.messages_sent, sent.messages_sent);
          // Twice what rounding of the inputs' format gives; gradients round P and dS too.
          const double forward = dtype == DType::kF32 ? 1e-5 : 0x1p-7, backward = dtype == DType::kF32 ? 5e-5 : 0x1p-5;
          const auto expect_near = [&](const Tensor& tensor, const Array& global, double bound) {
            EXPECT_LE(test::max_error(tensor.array(), rows_of(global, map, rank)), bound);
          };
          expect_near(got.out, want.out, forward);
          expect_near(got.lse, want.lse, 1e-5);
          expect_near(got.dq, gradients.dq, backward);
          expect_near(got.dk, gradients.dk, backward);
          expect_near(got.dv, gradients.dv, backward);
        }
      }
    }
  }
}

// A rank with another shape of the same call: nobody computes on.
TEST(MpiRing, RanksThatDisagreeGetAnErrorThatNamesStepAndSizes) {
  mpi::Endpoint whole(MPI_COMM_WORLD);
  const int64_t world = whole.world();
  if (world < 2) GTEST_SKIP() << "needs a peer";
  std::string message;
  try {
    mpi::Endpoint endpoint(MPI_COMM_WORLD, {.timeout = std::chrono::milliseconds(20000)});
    Problem p = problem_of(DType::kF32);
    if (endpoint.rank() == 1) p.kv_heads = 1;
    const Plan plan = build_plan(p, masks()[0].mask, ShardMap::contiguous(kLength, world), Schedule::kRing);
    test::run_rank(plan, test::random_inputs(5, p), endpoint);
  } catch (const TransportError& error) {
    message = error.what();
    EXPECT_GE(error.step, 0);
  }
  EXPECT_NE(message, "");
  if (whole.rank() == 1 || whole.rank() == 2 % world) {
    const bool says_sizes = message.find("expected") != std::string::npos && message.find("got") != std::string::npos;
    EXPECT_TRUE(says_sizes || message.find("is lost") != std::string::npos) << message;
  }
}

TEST(MpiRing, ARankThatLeavesInTheMiddleEndsTheCallOfTheOthers) {
  mpi::Endpoint whole(MPI_COMM_WORLD);
  const int64_t world = whole.world();
  if (world < 2) GTEST_SKIP() << "needs a peer";
  const Problem p = problem_of(DType::kF32);
  const Plan plan = build_plan(p, masks()[0].mask, ShardMap::contiguous(kLength, world), Schedule::kRing);
  int64_t step = -1;
  try {
    mpi::Endpoint endpoint(MPI_COMM_WORLD, {.timeout = std::chrono::milliseconds(20000)});
    if (endpoint.rank() == 0) throw Error("rank 0 has something wrong");
    test::run_rank(plan, test::random_inputs(5, p), endpoint);
  } catch (const TransportError& error) {
    step = error.step;
  } catch (const Error&) {
  }
  EXPECT_EQ(step >= 0, whole.rank() != 0);
}

}  // namespace
}  // namespace ringspan
