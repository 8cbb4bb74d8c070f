// Buffer: plain memory of one call, not initialised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ringspan/view/tensor_view.h"

namespace ringspan {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes)
      : data_(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes))), bytes_(bytes) {}

  std::byte* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<std::byte[]> data_;
  int64_t bytes_ = 0;
};

// Where the values of `view` are summed: `view` itself where it has the accumulator type, else a dense view of the same
// size on new memory in `buffer`.
inline TensorView accumulator_for(const TensorView& view, Buffer& buffer) {
  const DType accumulator = accumulator_of(view.dtype);
  if (view.dtype == accumulator) return view;
  buffer = Buffer(view.num_elements() * size_of(accumulator));
  return view_of(buffer.data(), accumulator, Layout::kBNSD, view.size);
}

}  // namespace ringspan
