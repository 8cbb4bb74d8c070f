// The vocabulary of all verbs: which question is asked, in words of the command line.
//
//   --mask    full | causal | window:L,R | chunked:N | prefix:P,...  | documents:LEN,...
//             causal, window, chunked and prefix take _top_left or _bottom_right (causal_bottom_right), which is
//             required where query and K/V lengths differ; documents_full, documents_window:L,R:LEN,... and
//             documents_chunked:N:LEN,... say what is kept inside a document (causal without). Batch entries are
//             separated by '/': documents:3,5/8. A negative side of a window has no bound. a&b keeps what both keep.
//             Also document_ids:ID,... and bands:Q0,Q1,K0,K1,LO,HI/... (mask/mask_kinds.h)
//   --shard   contiguous (unless told otherwise, as in Python) | head_tail (or zigzag) | striped | balanced (by the
//             mask) | per_document:LEN,... | lengths:LEN,...
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <CLI/CLI.hpp>

#include "ringspan/plan/plan.h"

namespace ringspan::cli {

struct Question {
  Problem problem;
  MaskSpec mask;
  ShardMap q_map, kv_map;
  Schedule schedule = Schedule::kRing;
  GradRoute grad_route = GradRoute::kFromNext;

  Plan plan() const { return build_plan(problem, mask, q_map, kv_map, schedule, grad_route); }
};

// What the user gave; `question()` throws Error where it does not fit together.
class QuestionOptions {
 public:
  void add_to(CLI::App& verb);
  Question question() const { return question_with(shard_, schedule_); }
  // For verbs that choose: what they put in the place of "auto" or "all".
  Question question_with(const std::string& shard, const std::string& schedule) const;
  const std::string& mask_text() const { return mask_; }
  const std::string& shard_text() const { return shard_; }
  const std::string& schedule_text() const { return schedule_; }
  // For the title of a picture.
  std::string note() const { return "mask " + mask_ + ", shard " + shard_; }
  int64_t world() const { return world_; }

 private:
  int64_t world_ = 1, seq_len_ = 0, batch_ = 1, heads_ = 1, head_dim_ = 64;
  std::optional<int64_t> kv_len_, kv_heads_, v_head_dim_;
  std::optional<double> scale_;
  std::string dtype_ = "fp32", layout_ = "BNSD", mask_ = "causal", shard_ = "contiguous", schedule_ = "ring";
  std::string grad_route_ = "from_next";
  std::optional<std::string> kv_shard_;
};

}  // namespace ringspan::cli
