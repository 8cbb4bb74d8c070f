// Pattern: which pairs a call keeps and who holds which rows. What a plan depends on beside sizes; built only where the
// plan is not known yet.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "binding/group/signature.h"
#include "binding/op/decode.h"

namespace ringspan::binding {

class Pattern {
 public:
  virtual ~Pattern() = default;

  // World, batch and global lengths.
  virtual SpecSizes sizes() const = 0;
  // All that mask and maps depend on: equal content, equal pattern.
  virtual void append_content(std::vector<int64_t>& words) const = 0;
  // Error naming what does not fit.
  virtual Decoded build() const = 0;
  // Mask and maps in words; other content gives another text.
  virtual Fields describe() const = 0;
};

// Of the description that crosses the dispatcher. `spec` and the tables are borrowed.
class DescribedPattern final : public Pattern {
 public:
  // Error where a table is not int64 on the CPU.
  DescribedPattern(at::IntArrayRef spec, at::TensorList tables);

  SpecSizes sizes() const override { return read_sizes(description_.spec); }
  void append_content(std::vector<int64_t>& words) const override;
  Decoded build() const override { return decode(description_); }
  Fields describe() const override;

 private:
  std::vector<at::Tensor> dense_;  // tables that had to be copied to be dense
  Description description_;
};

}  // namespace ringspan::binding
