// Ops that answer questions: positions, work, plans, instruction sets.
#include <chrono>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "ringspan/kernel/isa.h"
#include "ringspan/ledger/ledger.h"

#include "binding/ask/plan_question.h"
#include "binding/base/boxed_op.h"
#include "binding/base/errors.h"
#include "binding/base/parallel.h"
#include "binding/group/exchange.h"
#include "binding/op/plan_cache.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using std::string;

void check_alone_of(string what) { check_alone(what.c_str()); }

Tensor positions(at::IntArrayRef spec, at::TensorList tables, int64_t which, int64_t rank, int64_t batch) {
  const Decoded decoded = decode_arguments(spec, tables);
  RINGSPAN_CHECK(which == 0 || which == 1, "which is ", which, "; it must be 0 (query map) or 1 (key/value map)");
  const ShardMap& map = which == 0 ? decoded.q_map : decoded.kv_map;
  RINGSPAN_CHECK(0 <= rank && rank < map.world(), "rank is ", rank, "; the shard map has ", map.world(), " ranks");
  RINGSPAN_CHECK(0 <= batch && (map.num_lists() == 1 || batch < map.num_lists()), "batch entry ", batch,
                 " was asked for; the shard map has ", map.num_lists());
  return at::tensor(map.positions(rank, batch), at::kLong);
}

std::vector<int64_t> work(at::IntArrayRef spec, at::TensorList tables) {
  const Decoded decoded = decode_arguments(spec, tables);
  std::vector<int64_t> pairs = decoded.q_map.work(decoded.mask);
  // Masks and maps of one list stand for every batch entry.
  if (decoded.mask.num_lists() == 1 && decoded.q_map.num_lists() == 1) {
    for (int64_t& count : pairs) count *= decoded.batch;
  }
  return pairs;
}

// [n, 5]: rank, local_row, begin, length, stride.
Tensor table_of(const ShardMap& map) {
  std::vector<int64_t> words;
  for (int64_t rank = 0; rank < map.world(); ++rank) {
    for (const Segment& segment : map.segments(rank)) {
      for (const int64_t word : {rank, segment.local_row, segment.begin, segment.length, segment.stride}) {
        words.push_back(word);
      }
    }
  }
  return at::tensor(words, at::kLong).view({-1, 5});
}

Tensor per_document(at::IntArrayRef lengths, int64_t world, std::optional<int64_t> seq_len) {
  return table_of(ShardMap::per_document(lengths.vec(), world, seq_len));
}

Tensor balanced(at::IntArrayRef spec, at::TensorList tables) {
  const Decoded decoded = decode_arguments(spec, tables);
  return table_of(ShardMap::balanced(decoded.mask, decoded.world));
}

string plan_json(const RankQuestion& question) {
  const Plan plan = ask_plan(question.plan).plan;
  return question.rank < 0 ? plan.to_json() : to_json(plan.rank(question.rank));
}

string plan_text(const RankQuestion& question) {
  const Plan plan = ask_plan(question.plan).plan;
  return question.rank < 0 ? plan.str() : plan.rank(question.rank).str();
}

string ledger_json(const RankQuestion& question) {
  const PlanQuestion asked = ask_plan(question.plan);
  return to_json(ledger_of(asked.plan.rank(question.rank), asked.exchange));
}

std::vector<string> names_of_available_isas() {
  std::vector<string> names;
  for (Isa isa : available_isas()) names.emplace_back(name_of(isa));
  return names;
}

std::vector<int64_t> traffic(string group_name) {
  const Traffic posted = traffic_of(group_name);
  return {posted.messages, posted.bytes};
}

std::vector<int64_t> plan_cache_counts() {
  const PlanCache& cache = PlanCache::process();
  return {static_cast<int64_t>(cache.size()), cache.num_built()};
}

// How many different threads take part: each task waits a little, so that one thread cannot draw them all.
int64_t threads_of_parallel_run(int64_t num_tasks) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  torch_parallel().run(static_cast<int>(num_tasks), [&](int) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  return static_cast<int64_t>(threads.size());
}

string name_of_isa() { return string(name_of(current_isa())); }

void force_isa_by_name(string name) { force_isa(name.empty() ? std::nullopt : std::optional(parse_isa(name))); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  m.def("_positions(SymInt[] spec, Tensor[] tables, int which, int rank, int batch) -> Tensor",
        kTranslated<&positions>);
  m.def("_work(SymInt[] spec, Tensor[] tables) -> int[]", kTranslated<&work>);
  m.def("_per_document(int[] lengths, int world, int? seq_len) -> Tensor", kTranslated<&per_document>);
  m.def("_balanced(SymInt[] spec, Tensor[] tables) -> Tensor", kTranslated<&balanced>);
  // ValueError where `what` is called without a group in a job of several processes.
  m.def("_check_alone(str what) -> ()", kTranslated<&check_alone_of>);
  m.def(boxed_schema<RankQuestion>("_plan_json", "str").c_str(), boxed<RankQuestion, kTranslated<&plan_json>>());
  m.def(boxed_schema<RankQuestion>("_plan_text", "str").c_str(), boxed<RankQuestion, kTranslated<&plan_text>>());
  m.def(boxed_schema<RankQuestion>("_ledger_json", "str").c_str(), boxed<RankQuestion, kTranslated<&ledger_json>>());
  m.def("_isa() -> str", kTranslated<&name_of_isa>);
  m.def("_available_isas() -> str[]", &names_of_available_isas);
  m.def("_force_isa(str name) -> ()", kTranslated<&force_isa_by_name>);
  // [messages, bytes] that this process has posted in the group; whether to wait for what is posted at once.
  m.def("_traffic(str group_name) -> int[]", &traffic);
  m.def("_set_wait_at_post(bool waits) -> ()", &set_wait_at_post);
  // For tests: [plans held, plans built since the process began]; the number of threads in a parallel run.
  m.def("_plan_cache_counts() -> int[]", &plan_cache_counts);
  m.def("_threads_of_parallel_run(int num_tasks) -> int", &threads_of_parallel_run);
}

}  // namespace ringspan::binding
