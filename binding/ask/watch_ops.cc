// Ops about calls of a group and what goes wrong in them: refusals, threads, deadlines, the flight record.
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/library.h>

#include "binding/base/errors.h"
#include "binding/group/agreement.h"
#include "binding/group/debug.h"
#include "binding/group/trap.h"
#include "binding/op/agreed_call.h"
#include "binding/watch/deadline.h"

namespace ringspan::binding {
namespace {

using std::string;

// Null for a group of one rank.
std::shared_ptr<Agreement> agreement_of(const Group& group) {
  return has_peers(group) ? Agreement::of(group) : nullptr;
}

int64_t calls_of(string group_name) {
  const auto agreement = agreement_of(find_group(group_name));
  return agreement ? agreement->calls() : int64_t{0};
}

void refuse(string group_name, string message, bool is_unsupported, int64_t calls) {
  const Group group = find_group(group_name);
  const RefusalKind kind = is_unsupported ? RefusalKind::kUnsupported : RefusalKind::kBadArgument;
  if (const auto agreement = agreement_of(group)) agreement->refuse_since(group, kind, message, calls);
}

void hand_over(string group_name) {
  if (const auto agreement = agreement_of(find_group(group_name))) agreement->hand_over();
}

void set_deadline_to(std::optional<double> seconds) { set_deadline(seconds); }

void set_warnings(double first, double next) {
  const auto milliseconds = [](double seconds) {
    return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
  };
  set_warning_times({milliseconds(first), milliseconds(next)});
}

// For each entry 11 texts, in the order of python/ringspan/flight.py.
std::vector<string> flight_record() {
  std::vector<string> texts;
  for (const auto& agreement : Agreement::all()) {
    for (const FlightEntry& entry : agreement->record().entries()) {
      const Reached& at = entry.reached;
      const auto time = [](double seconds) { return std::to_string(seconds); };
      for (const string& text :
           {agreement->group_name(), concat(entry.number), entry.kind, entry.place, concat(entry.signature),
            concat(at.step), at.step < 0 || at.tensors.empty() ? string() : at.str(), time(entry.begun),
            time(entry.agreed), time(entry.ended), entry.outcome}) {
        texts.push_back(text);
      }
    }
  }
  return texts;
}

void set_trap_at(int64_t place, string what) { set_trap(place, what); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  // Calls of the group that this rank has taken part in; a refusal of the next one, unless there were more since.
  m.def("_calls(str group_name) -> int", kTranslated<&calls_of>);
  m.def("_refuse(str group_name, str message, bool is_unsupported, int calls) -> ()", kTranslated<&refuse>);
  m.def("_hand_over(str group_name) -> ()", kTranslated<&hand_over>);
  m.def("_set_deadline(float? seconds) -> ()", kTranslated<&set_deadline_to>);
  m.def("_is_debugged() -> bool", &is_debugged);
  m.def("_flight_record() -> str[]", &flight_record);
  // For tests: when a wait is warned of; what goes wrong at which place of an exchange, and the places so far.
  m.def("_set_warning_times(float first, float next) -> ()", &set_warnings);
  m.def("_set_trap(int place, str what) -> ()", kTranslated<&set_trap_at>);
  m.def("_places() -> int", &num_places);
}

}  // namespace ringspan::binding
