// Whether this process is one of several of a job: then a call without a group is most likely one whose group was
// forgotten, and would attend to this rank's part of the sequence alone.
#pragma once

#include <cstdint>

namespace ringspan::binding {

// Processes of the job as far as this one can tell: of the default process group, and where there is none, of the
// variables RANK and WORLD_SIZE. At most 0.2 us; a default group is seen a millisecond after it was made at the latest.
int64_t job_size();

// Error in a job of several processes: `what` was called without a group.
void check_alone(const char* what);

}  // namespace ringspan::binding
