// What transfers do to labels: which rows of a buffer a message holds, and the positions of labelled rows.
#pragma once

#include <vector>

#include "ringspan/plan/plan.h"
#include "ringspan/plan/proof/label_field.h"

namespace ringspan::detail {

// Rows of a transfer at one of its ends: runs of the tensor, and where they are in the message.
struct EndRun {
  int64_t row = 0, count = 0, message_row = 0;
};
std::vector<EndRun> end_runs(const Transfer& transfer, const BufferPlace& place);

// Whether a rect that lies in `run` holds the owner's rows that the transfer names for its place in the message.
bool is_named(const Transfer& transfer, const EndRun& run, const Rect& rect);

// Whether two transfers share rows and heads of a slot that both use.
bool meets(const Transfer& a, const BufferPlace& at_a, const Transfer& b, const BufferPlace& at_b);

// The part of a message that belongs to the run.
std::vector<Rect> cut_message(const std::vector<Rect>& message, const EndRun& run);

// The positions of rows as segments of the buffer.
std::vector<Segment> segments_of(const std::vector<RowRun>& runs, const ShardMap& map, int64_t batch);
// Whether rows [row0, row0 + rows) of the buffer are these positions.
bool lies_in(const std::vector<Segment>& segments, int64_t row0, int64_t rows, int64_t pos0, int64_t stride);

}  // namespace ringspan::detail
