// A backward call as waves over query rows x key/value rows of some key/value heads. Each wave packs its queries,
// runs one job per key/value block, then writes or adds its dQ, dK and dV to the caller's.
#include <algorithm>
#include <cstring>

#include "ringspan/kernel/call_support.h"
#include "ringspan/kernel/tile_index.h"

namespace ringspan::kernel {
namespace {

// Ranges of one wave, in blocks.
struct Span {
  int64_t group_begin, group_end;
  int64_t head_begin, head_end;
  int64_t q_begin, q_end;
  int64_t kv_begin, kv_end;
};

class BackwardCall {
 public:
  BackwardCall(const BackwardArgs& args, const CallResources& resources, const BackwardSizes& sizes)
      : args_(args),
        table_(resources.table),
        sizes_(sizes),
        parallel_(resources.parallel),
        kv_heads_(args.k.heads()),
        heads_per_kv_(args.q.heads() / args.k.heads()),
        kv_blocks_(divide_up(args.k.rows(), sizes.block_kv)),
        index_(args.tiles, args.q.batch(), args.q.rows(), args.k.rows(), sizes.block_q) {}

  void run(Workspace& workspace);

 private:
  // How much of one group a wave takes.
  struct Cut {
    int64_t heads = 1, q_blocks = 1, kv_blocks = 1;
  };
  Cut cut_group(int64_t budget) const;
  int64_t group_bytes() const {
    return heads_per_kv_ * index_.num_q_blocks() * sizes_.q_block_bytes + kv_blocks_ * sizes_.kv_block_bytes;
  }
  int64_t worker_bytes() const { return sizes_.scratch_bytes + (wave_.writes_at_once ? sizes_.kv_block_bytes : 0); }
  void plan_spans();
  void lay_out(Arena& arena);
  void begin_wave(const Span& span);
  void plan_steps(const Span& span);
  void plan_jobs(const Span& span);
  void run_span(const Span& span);
  void write(const Span& span);
  int64_t num_query_units(const Span& span) const {
    return (span.group_end - span.group_begin) * (span.head_end - span.head_begin) * (span.q_end - span.q_begin);
  }
  // Whether groups add to the same elements of dbias: then one wave holds one group. Inside a group an element belongs
  // to one key/value block, and so to one job.
  bool shares_bias() const {
    const auto shared = [this](int axis) { return args_.dbias.size[axis] > 1 && args_.dbias.stride[axis] == 0; };
    return args_.dbias.is_given() && (shared(0) || shared(1));
  }
  int64_t num_kv_units(const Span& span) const {
    return (span.group_end - span.group_begin) * (span.kv_end - span.kv_begin);
  }

  const BackwardArgs& args_;
  const KernelTable& table_;
  const BackwardSizes& sizes_;
  const Parallel& parallel_;
  int64_t kv_heads_, heads_per_kv_, kv_blocks_;
  TileIndex index_;
  std::vector<Span> spans_;
  int workers_ = 1;

  BackwardWave wave_{};
  unsigned char* scratch_ = nullptr;
  // The q blocks that each key/value block of each batch entry of the wave meets, in ascending order.
  std::vector<BackwardStep> steps_;
  std::vector<int64_t> step_start_;
  std::vector<BackwardJob> jobs_;
  std::vector<QueryProgress> progress_;
  bool accumulating_ = false;
};

// Into waves that fit. Where a group (one key/value head of one batch entry) does not: a third of the budget for its
// sums, the rest for queries. In fixed order each side is cut without a look at the other's length, for dq adds up over
// parts of the keys, dk and dv over parts of the queries.
BackwardCall::Cut BackwardCall::cut_group(int64_t budget) const {
  const int64_t q_blocks = index_.num_q_blocks();
  const int64_t q_bytes = sizes_.q_block_bytes, kv_bytes = sizes_.kv_block_bytes;
  if (!args_.fixed_order && group_bytes() <= budget) return {heads_per_kv_, q_blocks, kv_blocks_};
  const auto even = [](int64_t count, int64_t most) {
    most = std::clamp<int64_t>(most, 1, std::max<int64_t>(count, 1));
    return std::max<int64_t>(divide_up(count, divide_up(std::max<int64_t>(count, 1), most)), 1);
  };
  Cut cut;
  cut.kv_blocks = even(kv_blocks_, budget / 3 / kv_bytes);
  const int64_t kv_share = args_.fixed_order ? budget / 3 : cut.kv_blocks * kv_bytes;
  const int64_t q_units = (budget - kv_share) / q_bytes;
  cut.q_blocks = even(q_blocks, q_units);
  cut.heads = even(heads_per_kv_, q_units / cut.q_blocks);
  return cut;
}

void BackwardCall::plan_spans() {
  const int64_t groups = args_.q.batch() * kv_heads_, q_blocks = index_.num_q_blocks();
  const int64_t budget = kPackedBytes + kPartialBytes;
  const Cut cut = cut_group(budget);
  if (cut.heads >= heads_per_kv_ && cut.q_blocks >= q_blocks && cut.kv_blocks >= kv_blocks_) {
    const int64_t most_groups = shares_bias() ? 1 : budget / std::max<int64_t>(group_bytes(), 1);
    const int64_t waves = std::max<int64_t>(divide_up(groups, std::max<int64_t>(most_groups, 1)), 1);
    const int64_t per_wave = divide_up(groups, waves);
    for (int64_t begin = 0; begin < groups; begin += per_wave) {
      spans_.push_back({begin, std::min(begin + per_wave, groups), 0, heads_per_kv_, 0, q_blocks, 0, kv_blocks_});
    }
    return;
  }
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t head = 0; head < heads_per_kv_; head += cut.heads) {
      for (int64_t kv = 0; kv < std::max<int64_t>(kv_blocks_, 1); kv += cut.kv_blocks) {
        for (int64_t q = 0; q < std::max<int64_t>(q_blocks, 1); q += cut.q_blocks) {
          spans_.push_back({group, group + 1, head, std::min(head + cut.heads, heads_per_kv_), q,
                            std::min(q + cut.q_blocks, q_blocks), kv, std::min(kv + cut.kv_blocks, kv_blocks_)});
        }
      }
    }
  }
}

void BackwardCall::lay_out(Arena& arena) {
  int64_t query_units = 0, kv_units = 0;
  for (const Span& span : spans_) {
    query_units = std::max(query_units, num_query_units(span));
    kv_units = std::max(kv_units, num_kv_units(span));
  }
  wave_.packed_q = arena.take(query_units * sizes_.q_block_bytes);
  if (!wave_.writes_at_once) wave_.sums_kv = arena.take(kv_units * sizes_.kv_block_bytes);
  scratch_ = arena.take(workers_ * worker_bytes());
}

void BackwardCall::begin_wave(const Span& span) {
  wave_.first_group = span.group_begin;
  wave_.head_begin = span.head_begin;
  wave_.head_end = span.head_end;
  wave_.q_begin = span.q_begin * sizes_.block_q;
  wave_.q_end = std::min(span.q_end * sizes_.block_q, args_.q.rows());
  wave_.kv_begin = span.kv_begin * sizes_.block_kv;
  wave_.kv_end = std::min(span.kv_end * sizes_.block_kv, args_.k.rows());
  wave_.q_blocks = span.q_end - span.q_begin;
  wave_.kv_blocks = span.kv_end - span.kv_begin;
  // Rows of dq meet their first keys in the first chunk, rows of dk and dv their first queries likewise.
  wave_.dq_overwrite = args_.dq_begin && span.kv_begin == 0;
  wave_.dkv_overwrite = args_.dkv_begin && span.q_begin == 0 && span.head_begin == 0;
}

// Which q blocks each key/value block meets. Turns count up the key/value blocks of a q block in ascending order.
void BackwardCall::plan_steps(const Span& span) {
  const int64_t first_batch = span.group_begin / kv_heads_;
  const int64_t batches = span.group_end == span.group_begin ? 0 : (span.group_end - 1) / kv_heads_ - first_batch + 1;
  std::vector<uint8_t> meets(wave_.kv_blocks);
  const auto for_each_meeting = [&](auto&& visit) {
    for (int64_t b = 0; b < batches; ++b) {
      for (int64_t q = span.q_begin; q < span.q_end; ++q) {
        std::fill(meets.begin(), meets.end(), 0);
        for (const TileRows& rows : index_.rows_of(first_batch + b, q)) {
          const int64_t begin = std::max(rows.col_begin, wave_.kv_begin), end = std::min(rows.col_end, wave_.kv_end);
          if (begin >= end) continue;
          const int64_t block = (begin - wave_.kv_begin) / sizes_.block_kv;
          const int64_t block_end = divide_up(end - wave_.kv_begin, sizes_.block_kv);
          std::fill(meets.begin() + block, meets.begin() + block_end, 1);
        }
        uint32_t turn = 0;
        const auto turns = static_cast<uint32_t>(std::count(meets.begin(), meets.end(), 1));
        for (int64_t kv = 0; kv < wave_.kv_blocks; ++kv) {
          if (!meets[kv]) continue;
          visit(b * wave_.kv_blocks + kv, BackwardStep{q - span.q_begin, turn, turn + 1 == turns});
          ++turn;
        }
      }
    }
  };
  step_start_.assign(batches * wave_.kv_blocks + 1, 0);
  for_each_meeting([&](int64_t list, const BackwardStep&) { ++step_start_[list + 1]; });
  for (std::size_t i = 1; i < step_start_.size(); ++i) step_start_[i] += step_start_[i - 1];
  steps_.resize(step_start_.back());
  std::vector<int64_t> next(step_start_.begin(), step_start_.end() - 1);
  for_each_meeting([&](int64_t list, const BackwardStep& step) { steps_[next[list]++] = step; });
}

// As many heads side by side as there are workers: neighbouring jobs, which run at the same time, then belong to
// different heads and don't wait for each other, and the queries of a head stay in the cache from block to block (8
// heads of 1024 x 128 on one thread: 148 ms with all heads side by side, 140 ms head by head). The order changes no
// bits.
void BackwardCall::plan_jobs(const Span& span) {
  jobs_.clear();
  const int64_t first_batch = span.group_begin / kv_heads_;
  for (int64_t begin = span.group_begin; begin < span.group_end; begin += workers_) {
    const int64_t end = std::min(begin + workers_, span.group_end);
    for (int64_t kv = 0; kv < wave_.kv_blocks; ++kv) {
      for (int64_t group = begin; group < end; ++group) {
        const int64_t list = (group / kv_heads_ - first_batch) * wave_.kv_blocks + kv;
        jobs_.push_back({group - span.group_begin, kv, steps_.data() + step_start_[list],
                         step_start_[list + 1] - step_start_[list]});
      }
    }
  }
}

void BackwardCall::run_span(const Span& span) {
  begin_wave(span);
  plan_steps(span);
  plan_jobs(span);
  progress_.assign(num_query_units(span), {});
  wave_.progress = progress_.data();
  run_jobs(parallel_, workers_, static_cast<int64_t>(jobs_.size()), scratch_, worker_bytes(),
           [&](int64_t i, unsigned char* scratch) { table_.backward_run(wave_, jobs_[i], scratch); });
  if (!accumulating_ && args_.before_accumulate) args_.before_accumulate();
  accumulating_ = true;
  write(span);
}

// What the jobs have not written.
void BackwardCall::write(const Span& span) {
  const int64_t heads = span.head_end - span.head_begin;
  const int64_t query_units = args_.wants_dq ? num_query_units(span) : 0;
  const int64_t kv_units = args_.wants_dkv && !wave_.writes_at_once ? num_kv_units(span) : 0;
  run_jobs(parallel_, workers_, query_units + kv_units, scratch_, worker_bytes(), [&](int64_t i, unsigned char*) {
    if (i < query_units) {
      if (wave_.writes_at_once && progress_[i].turn > 0) return;
      const int64_t head = i / wave_.q_blocks % heads + span.head_begin;
      table_.backward_write_q(wave_, i / wave_.q_blocks / heads, head, i % wave_.q_blocks);
    } else {
      i -= query_units;
      table_.backward_write_kv(wave_, i / wave_.kv_blocks, i % wave_.kv_blocks);
    }
  });
}

void BackwardCall::run(Workspace& workspace) {
  plan_spans();
  const double work = static_cast<double>(args_.q.batch() * args_.q.heads()) * static_cast<double>(args_.q.rows()) *
                      static_cast<double>(args_.k.rows()) * static_cast<double>(args_.q.dim() + args_.v.dim());
  // Else dk and dv may not be touched before all jobs are done.
  wave_.writes_at_once = !args_.before_accumulate;
  workers_ = count_workers(parallel_, worker_bytes(), work);
  wave_.q = raw_view(args_.q);
  wave_.k = raw_view(args_.k);
  wave_.v = raw_view(args_.v);
  wave_.dout = raw_view(args_.dout);
  wave_.lse = raw_view(args_.lse);
  wave_.delta = raw_view(args_.delta);
  wave_.wants_dq = args_.wants_dq;
  wave_.wants_dkv = args_.wants_dkv;
  if (args_.wants_dq) wave_.dq = raw_view(args_.dq);
  if (args_.wants_dkv) wave_.dk = raw_view(args_.dk);
  if (args_.wants_dkv) wave_.dv = raw_view(args_.dv);
  wave_.pairs = pair_rule(args_.pairs);
  wave_.dbias = raw_view(args_.dbias);
  wave_.scale = args_.scale;
  wave_.heads_per_kv = heads_per_kv_;
  wave_.kv_heads = kv_heads_;
  wave_.tiles = index_.lists();
  wave_.sizes = sizes_;
  Arena count(nullptr);
  lay_out(count);
  Arena arena(workspace.reserve(static_cast<std::size_t>(count.used())));
  lay_out(arena);
  for (const Span& span : spans_) run_span(span);
  if (!accumulating_ && args_.before_accumulate) args_.before_accumulate();
}

}  // namespace

void run_backward(const BackwardArgs& args, const CallResources& resources) {
  BackwardSizes sizes{};
  resources.table.backward_sizes(args.q.dim(), args.v.dim(), &sizes);
  BackwardCall(args, resources, sizes).run(resources.workspace);
}

}  // namespace ringspan::kernel
