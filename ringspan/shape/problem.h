// Problem: every size of one attention call, checked once, in global terms (the whole sequence, not a shard).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ringspan/base/dtype.h"
#include "ringspan/shape/head_dim.h"
#include "ringspan/shape/segment.h"

namespace ringspan {

// Memory order of an activation; H = heads * head dim. TND: the tokens of all documents one after the other, one batch
// entry.
enum class Layout : uint8_t { kBNSD, kBSND, kBSH, kSBH, kTND };
inline constexpr const char* kLayoutNames[] = {"BNSD", "BSND", "BSH", "SBH", "TND"};  // in the same order

const char* name_of(Layout layout);
Layout parse_layout(std::string_view name);

// A tensor [batch or 1, query heads or 1, query rows, key positions] that is split by query rows beside q: where query
// rows travel, it travels with them. `batch` 0 = there is none (or all rows share it, and every rank has it).
struct RowTensor {
  int64_t batch = 0, heads = 0, element_bytes = 0;
  bool wants_gradient = false;

  bool is_given() const { return batch > 0; }
  bool has_gradient() const { return is_given() && wants_gradient; }
  bool operator==(const RowTensor&) const = default;
};

struct Problem {
  int64_t batch = 1;
  int64_t q_heads = 1;
  int64_t kv_heads = 1;  // divides q_heads; query head h reads KV head h / (q_heads / kv_heads)
  int64_t q_len = 0;     // tokens of the whole query sequence
  int64_t kv_len = 0;    // tokens of the whole key/value sequence
  int64_t qk_dim = 0;    // head dim of q and k, 1..kMaxHeadDim
  int64_t v_dim = 0;     // head dim of v and out, 1..kMaxHeadDim
  DType dtype = DType::kF32;
  Layout layout = Layout::kBNSD;
  double scale = 0;  // scores are scale * (q . k); default_scale() where the user gave none
  RowTensor bias{}, mask{};

  int64_t heads_per_kv() const { return q_heads / kv_heads; }

  // Error naming the field and its value unless all sizes are usable and `scale` is finite, also
  // in the type that scores are computed in.
  void check() const;

  // One line, e.g. "batch 1, heads 8/2, q_len 4096, kv_len 4096, qk_dim 64, v_dim 64, bf16, BNSD, scale 0.125".
  std::string str() const;

  bool operator==(const Problem&) const = default;
};

double default_scale(int64_t qk_dim);  // 1 / sqrt(qk_dim)

}  // namespace ringspan
