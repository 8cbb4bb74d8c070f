#include "binding/watch/interpreter.h"

#include <cstdlib>
#include <optional>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Logging.h>
#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include "ringspan/base/error.h"

namespace ringspan::binding {
namespace {

// Nothing where Python has registered no kernel.
std::optional<torch::jit::Stack> ask_python(const char* name, torch::jit::Stack stack) {
  const auto op = c10::Dispatcher::singleton().findOp({name, ""});
  if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) return std::nullopt;
  // No mode of the caller has a part in this.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  op->callBoxed(stack);
  return stack;
}

}  // namespace

void serve_interpreter(const std::string& warning) {
  if (!ask_python("ringspan::_while_waiting", {warning}) && !warning.empty()) LOG(WARNING) << warning;
}

std::string name_of_thread() {
  const auto name = ask_python("ringspan::_thread_name", {});
  const auto number = static_cast<int64_t>(::syscall(SYS_gettid));
  return name ? concat("thread ", number, " (", (*name)[0].toStringRef(), ")") : concat("thread ", number);
}

void write_flight_record() noexcept {
  if (!std::getenv("RINGSPAN_FLIGHT_RECORD")) return;
  try {
    ask_python("ringspan::_write_flight_record", {});
  } catch (const std::exception& error) {
    LOG(WARNING) << "ringspan: the flight record was not written: " << error.what();
  }
}

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  m.def("_while_waiting(str warning) -> ()");
  m.def("_thread_name() -> str");
  m.def("_write_flight_record() -> ()");
}

}  // namespace ringspan::binding
