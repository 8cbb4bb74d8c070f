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

}  // namespace ringspan
