// The core's two kinds of failure as PyTorch's exceptions: Error -> ValueError, Unsupported -> NotImplementedError,
// TransportError -> DistBackendError.
#pragma once

#include <utility>

#include <c10/util/Exception.h>

#include "ringspan/base/error.h"

namespace ringspan::binding {

[[noreturn]] inline void throw_peer_error(const std::string& message) { C10_THROW_ERROR(DistBackendError, message); }

template <class Action>
auto translate_errors(Action&& action) -> decltype(action()) {
  try {
    return std::forward<Action>(action)();
  } catch (const Unsupported& error) {
    C10_THROW_ERROR(NotImplementedError, error.what());
  } catch (const Error& error) {
    C10_THROW_ERROR(ValueError, error.what());
  } catch (const TransportError& error) {
    throw_peer_error(error.what());
  }
}

// The message of an exception without PyTorch's C++ stack.
inline std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace ringspan::binding
