// The core's two kinds of failure as PyTorch's exceptions: Error -> ValueError, Unsupported -> NotImplementedError,
// TransportError -> DistBackendError.
#pragma once

#include <string>
#include <string_view>
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

// kFunction with its failures translated.
template <auto kFunction>
struct Translated;
template <class Result, class... Arguments, Result (*kFunction)(Arguments...)>
struct Translated<kFunction> {
  static Result run(Arguments... arguments) {
    return translate_errors([&] { return kFunction(std::forward<Arguments>(arguments)...); });
  }
};
template <auto kFunction>
constexpr auto* kTranslated = &Translated<kFunction>::run;

// The message of an exception without PyTorch's C++ stack, or pybind11's of Python ("Type: text\n\nAt:\n ...").
inline std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  if (torch_error) return torch_error->what_without_backtrace();
  const std::string text = error.what();
  return text.substr(0, text.find("\n\nAt:\n"));
}

// Whether an exception says that something is not offered. That of a kernel in Python has its type in its text only.
inline bool is_unsupported(const std::exception& error) {
  return dynamic_cast<const Unsupported*>(&error) || dynamic_cast<const c10::NotImplementedError*>(&error) ||
         std::string_view(error.what()).starts_with("NotImplementedError: ");
}

}  // namespace ringspan::binding
