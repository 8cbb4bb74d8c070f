#include "cli/options.h"

#include "ringspan/mask/mask_kinds.h"
#include "ringspan/shard/map_kinds.h"

namespace ringspan::cli {

void QuestionOptions::add_to(CLI::App& verb) {
  verb.add_option("--world", world_, "Ranks")->capture_default_str();
  verb.add_option("--seq-len", seq_len_, "Tokens of the whole query sequence")->required();
  verb.add_option("--kv-len", kv_len_, "Tokens of the whole key/value sequence [as --seq-len]");
  verb.add_option("--batch", batch_, "Batch entries")->capture_default_str();
  verb.add_option("--heads", heads_, "Query heads")->capture_default_str();
  verb.add_option("--kv-heads", kv_heads_, "Key/value heads [as --heads]");
  verb.add_option("--head-dim", head_dim_, "Head dim of q and k")->capture_default_str();
  verb.add_option("--v-head-dim", v_head_dim_, "Head dim of v and out [as --head-dim]");
  verb.add_option("--dtype", dtype_, dtype_help())->capture_default_str();
  verb.add_option("--layout", layout_, "BNSD, BSND, BSH or SBH")->capture_default_str();
  verb.add_option("--scale", scale_, "Of the scores [1/sqrt(head dim)]");
  verb.add_option("--mask", mask_, mask_help())->capture_default_str();
  verb.add_option("--shard", shard_, map_help())->capture_default_str();
  verb.add_option("--kv-shard", kv_shard_, "The same for keys and values [as --shard]");
  verb.add_option("--schedule", schedule_, schedule_help())->capture_default_str();
  verb.add_option("--grad-route", grad_route_, "from_next or from_owner")->capture_default_str();
}

Question QuestionOptions::question_with(const std::string& shard, const std::string& schedule) const {
  Problem problem{.batch = batch_,
                  .q_heads = heads_,
                  .kv_heads = kv_heads_.value_or(heads_),
                  .q_len = seq_len_,
                  .kv_len = kv_len_.value_or(seq_len_),
                  .qk_dim = head_dim_,
                  .v_dim = v_head_dim_.value_or(head_dim_),
                  .dtype = parse_dtype(dtype_),
                  .layout = parse_layout(layout_)};
  problem.scale = scale_.value_or(head_dim_ > 0 ? default_scale(head_dim_) : 0.0);
  problem.check();
  const MaskSpec mask = parse_mask(mask_, problem.q_len, problem.kv_len);
  return {.problem = problem,
          .mask = mask,
          .q_map = parse_shard_map(shard, mask, problem.q_len, world_),
          .kv_map = parse_shard_map(kv_shard_.value_or(shard), mask, problem.kv_len, world_),
          .schedule = parse_schedule(schedule),
          .grad_route = parse_route(grad_route_, "grad route")};
}

}  // namespace ringspan::cli
