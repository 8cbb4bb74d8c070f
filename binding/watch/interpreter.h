// What a thread that waits here does for the program around it. Python takes part by two ops that it registers
// (python/ringspan/waiting.py); a program without Python has none of them, and its warnings go to PyTorch's log.
#pragma once

#include <string>

namespace ringspan::binding {

// Logs `warning` where it is not "", and runs the signal handlers of Python that wait for their turn: throws what they
// raise, such as KeyboardInterrupt. About 5 us.
void serve_interpreter(const std::string& warning);

// "thread 4711 (MainThread)": the system's number, and the name that the program gave.
std::string name_of_thread();

// Has Python write the flight record to the file that RINGSPAN_FLIGHT_RECORD names, if it does.
void write_flight_record() noexcept;

}  // namespace ringspan::binding
