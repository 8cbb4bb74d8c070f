// A forward call as waves. A wave is as many key/value heads, or as many rows of one, as fit packed into the
// workspace; it packs them in parallel, then runs its jobs, the heaviest first.
//
//   short keys:   wave 0 = heads 0..4 | wave 1 = heads 5..9         every job ends its rows
//   long keys:    wave 0 = head 0, rows [0, n) | wave 1 = head 0, rows [n, 2n) ...   rows go on in a state
#include <algorithm>
#include <cstring>

#include "ringspan/kernel/call_support.h"
#include "ringspan/kernel/tile_index.h"

namespace ringspan::kernel {
namespace {

// A part shorter than this costs more in merging than it gains.
constexpr int64_t kMinPartCols = 512;

// What one wave works on. Head and q block ranges are narrower than everything only while the rows' state lives in the
// workspace.
struct Span {
  int64_t group_begin, group_end;
  int64_t head_begin, head_end;
  int64_t q_block_begin, q_block_end;
  int64_t kv_block_begin, kv_block_end;
  bool load, finish;
};

int64_t num_blocks(const Span& span) {
  return (span.group_end - span.group_begin) * (span.head_end - span.head_begin) *
         (span.q_block_end - span.q_block_begin);
}

struct WeighedJob {
  ForwardJob job;
  double weight;
};

class ForwardCall {
 public:
  ForwardCall(const ForwardArgs& args, const CallResources& resources, const ForwardSizes& sizes)
      : args_(args),
        resources_(resources),
        table_(resources.table),
        sizes_(sizes),
        parallel_(resources.parallel),
        kv_heads_(args.k.heads()),
        heads_per_kv_(args.q.heads() / args.k.heads()),
        kv_len_(args.k.rows()),
        kv_blocks_(divide_up(kv_len_, sizes.block_kv)),
        index_(args.tiles, args.q.batch(), args.q.rows(), kv_len_, sizes.block_q),
        wave_(forward_wave(args)) {}

  void run();

 private:
  void plan_spans();
  void plan_long_rows(int64_t blocks_per_wave);
  bool keeps_own_state(bool several_chunks) const {
    return several_chunks && args_.begin && args_.finish && !args_.state.acc.is_given();
  }
  int64_t own_state_row_bytes() const { return (args_.v.dim() + 2) * size_of(accumulator_of(args_.q.dtype)); }
  void lay_out(Arena& arena);
  void point_state(const Span& span);
  void plan_jobs(const Span& span);
  int64_t most_parts(const Span& span) const;
  void add_job(const ForwardJob& job, double weight, int64_t col_begin, int64_t col_end, int64_t parts);
  void run_span(const Span& span);
  void pack(const Span& span);

  const ForwardArgs& args_;
  const CallResources& resources_;
  const KernelTable& table_;
  const ForwardSizes& sizes_;
  const Parallel& parallel_;
  int64_t kv_heads_, heads_per_kv_, kv_len_, kv_blocks_;
  TileIndex index_;
  std::vector<Span> spans_;
  int64_t most_blocks_ = 0;  // packed at one time
  int64_t own_rows_ = 0;     // rows of state in the workspace
  int workers_ = 1;

  ForwardWave wave_;
  unsigned char *scratch_ = nullptr, *own_state_ = nullptr;
  std::vector<WeighedJob> jobs_;
  std::vector<MergeJob> merges_;
};

void ForwardCall::plan_spans() {
  const int64_t groups = args_.q.batch() * kv_heads_;
  const int64_t block_bytes = sizes_.k_block_bytes + sizes_.v_block_bytes;
  const int64_t blocks_per_wave = std::max<int64_t>(kPackedBytes / block_bytes, 1);
  if (kv_blocks_ > blocks_per_wave) return plan_long_rows(blocks_per_wave);
  // Waves of about the same size.
  const int64_t most_groups = kv_blocks_ == 0 ? groups : std::max<int64_t>(blocks_per_wave / kv_blocks_, 1);
  const int64_t waves = divide_up(groups, most_groups);
  const int64_t per_wave = waves == 0 ? 0 : divide_up(groups, waves);
  for (int64_t begin = 0; begin < groups; begin += per_wave) {
    spans_.push_back({begin, std::min(begin + per_wave, groups), 0, heads_per_kv_, 0, index_.num_q_blocks(), 0,
                      kv_blocks_, !args_.begin, args_.finish});
  }
  most_blocks_ = per_wave * kv_blocks_;
}

void ForwardCall::plan_long_rows(int64_t blocks_per_wave) {
  const int64_t groups = args_.q.batch() * kv_heads_;
  const int64_t chunks = divide_up(kv_blocks_, blocks_per_wave);
  const int64_t chunk = divide_up(kv_blocks_, chunks);
  most_blocks_ = chunk;
  int64_t heads = heads_per_kv_, q_blocks = index_.num_q_blocks();
  if (keeps_own_state(true)) {
    const int64_t block_rows = std::max<int64_t>(kPartialBytes / 2 / own_state_row_bytes() / sizes_.block_q, 1);
    q_blocks = std::min(q_blocks, block_rows);
    heads = std::min(heads, std::max<int64_t>(block_rows / q_blocks, 1));
    own_rows_ = heads * q_blocks * sizes_.block_q;
  }
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t head = 0; head < heads_per_kv_; head += heads) {
      for (int64_t q_block = 0; q_block < index_.num_q_blocks(); q_block += q_blocks) {
        for (int64_t block = 0; block < kv_blocks_; block += chunk) {
          const int64_t end = std::min(block + chunk, kv_blocks_);
          spans_.push_back({group, group + 1, head, std::min(head + heads, heads_per_kv_), q_block,
                            std::min(q_block + q_blocks, index_.num_q_blocks()), block, end, !args_.begin || block > 0,
                            args_.finish && end == kv_blocks_});
        }
      }
    }
  }
}

void ForwardCall::lay_out(Arena& arena) {
  wave_.packed_k = arena.take(most_blocks_ * sizes_.k_block_bytes);
  wave_.packed_v = arena.take(most_blocks_ * sizes_.v_block_bytes);
  wave_.v_nonfinite = arena.take(most_blocks_);
  own_state_ = arena.take(own_rows_ * own_state_row_bytes());
  int64_t partials = 0;
  for (const Span& span : spans_) {
    if (most_parts(span) > 1) partials = std::max(partials, most_parts(span) * num_blocks(span));
  }
  wave_.partials = arena.take(partials * sizes_.partial_bytes);
  scratch_ = arena.take(workers_ * sizes_.scratch_bytes);
}

// Where the caller keeps no state, rows that go on from wave to wave keep it in the workspace.
void ForwardCall::point_state(const Span& span) {
  if (own_rows_ == 0) return;
  const DType dtype = accumulator_of(args_.q.dtype);
  const int64_t bytes = size_of(dtype), rows = (span.q_block_end - span.q_block_begin) * sizes_.block_q;
  const int64_t batch = span.group_begin / kv_heads_;
  const int64_t head = span.group_begin % kv_heads_ * heads_per_kv_ + span.head_begin;
  const int64_t row = span.q_block_begin * sizes_.block_q;
  const auto view_at = [&](unsigned char* data, int64_t dim) {
    RawView view{data, {0, rows * dim * bytes, dim * bytes, bytes}, dim, static_cast<Element>(dtype)};
    // Rows and heads are counted from the tensor's first.
    view.data -= batch * view.stride[0] + head * view.stride[1] + row * view.stride[2];
    return view;
  };
  wave_.state_max = view_at(own_state_, 1);
  wave_.state_sum = view_at(own_state_ + own_rows_ * bytes, 1);
  wave_.state_acc = view_at(own_state_ + 2 * own_rows_ * bytes, args_.v.dim());
}

// Into how many parts a job of the span may be split.
int64_t ForwardCall::most_parts(const Span& span) const {
  if (args_.fixed_order) return 1;
  const int64_t jobs = std::max<int64_t>(num_blocks(span), 1);
  const int64_t fit = kPartialBytes / 2 / sizes_.partial_bytes / jobs;
  return std::clamp<int64_t>(divide_up(kEnoughJobs, jobs), 1, std::max<int64_t>(fit, 1));
}

void ForwardCall::add_job(const ForwardJob& job, double weight, int64_t col_begin, int64_t col_end, int64_t parts) {
  const int64_t block_begin = col_begin / sizes_.block_kv, block_end = divide_up(col_end, sizes_.block_kv);
  const int64_t blocks = block_end - block_begin;
  const int64_t min_blocks = divide_up(kMinPartCols, sizes_.block_kv);
  parts = std::clamp<int64_t>(blocks / min_blocks, 1, parts);
  if (parts == 1) return jobs_.push_back({job, weight});
  const int64_t used =
      merges_.empty() ? 0
                      : merges_.back().partials - wave_.partials + merges_.back().num_partials * sizes_.partial_bytes;
  merges_.push_back({job.batch, job.head, job.q_block, wave_.partials + used, parts});
  for (int64_t i = 0; i < parts; ++i) {
    ForwardJob part = job;
    part.kv_begin = std::max(job.kv_begin, (block_begin + blocks * i / parts) * sizes_.block_kv);
    part.kv_end = std::min(job.kv_end, (block_begin + blocks * (i + 1) / parts) * sizes_.block_kv);
    part.partial = wave_.partials + used + i * sizes_.partial_bytes;
    jobs_.push_back({part, weight / static_cast<double>(parts)});
  }
}

void ForwardCall::plan_jobs(const Span& span) {
  jobs_.clear();
  merges_.clear();
  const int64_t parts = most_parts(span);
  for (int64_t group = span.group_begin; group < span.group_end; ++group) {
    const int64_t batch = group / kv_heads_;
    for (int64_t q_block = span.q_block_begin; q_block < span.q_block_end; ++q_block) {
      double weight = 0;
      int64_t col_begin = wave_.kv_end, col_end = wave_.kv_begin;
      for (const TileRows& rows : index_.rows_of(batch, q_block)) {
        const int64_t begin = std::max(rows.col_begin, wave_.kv_begin), end = std::min(rows.col_end, wave_.kv_end);
        if (begin >= end) continue;
        weight += static_cast<double>(end - begin) * static_cast<double>(rows.row_end - rows.row_begin);
        col_begin = std::min(col_begin, begin);
        col_end = std::max(col_end, end);
      }
      // Nothing to add, and the rows neither begin nor end here.
      if (weight == 0 && span.load && !span.finish) continue;
      for (int64_t head = span.head_begin; head < span.head_end; ++head) {
        const ForwardJob job{
            batch, group % kv_heads_ * heads_per_kv_ + head, q_block, wave_.kv_begin, wave_.kv_end, nullptr, nullptr};
        if (weight == 0) {
          jobs_.push_back({job, 0});
        } else {
          add_job(job, weight, col_begin, col_end, parts);
        }
      }
    }
  }
  std::stable_sort(jobs_.begin(), jobs_.end(),
                   [](const WeighedJob& a, const WeighedJob& b) { return a.weight > b.weight; });
}

void ForwardCall::pack(const Span& span) {
  std::vector<int64_t> blocks;  // group * blocks_per_group + block, those that a tile covers
  for (int64_t group = span.group_begin; group < span.group_end; ++group) {
    const uint8_t* covered = wave_.tiles.kv_covered + group / kv_heads_ * kv_len_;
    for (int64_t block = 0; block < wave_.blocks_per_group; ++block) {
      const int64_t begin = wave_.kv_begin + block * sizes_.block_kv;
      const int64_t end = std::min(begin + sizes_.block_kv, wave_.kv_end);
      if (std::memchr(covered + begin, 1, static_cast<std::size_t>(end - begin)) == nullptr) continue;
      blocks.push_back((group - span.group_begin) * wave_.blocks_per_group + block);
    }
  }
  run_jobs(parallel_, workers_, static_cast<int64_t>(blocks.size()), scratch_, sizes_.scratch_bytes,
           [&](int64_t i, unsigned char* scratch) {
             wave_.v_nonfinite[blocks[i]] =
                 table_.forward_pack(wave_, blocks[i] / wave_.blocks_per_group, blocks[i] % wave_.blocks_per_group,
                                     {0, sizes_.block_kv}, scratch);
           });
}

void ForwardCall::run_span(const Span& span) {
  wave_.first_group = span.group_begin;
  wave_.kv_begin = span.kv_block_begin * sizes_.block_kv;
  wave_.kv_end = std::min(span.kv_block_end * sizes_.block_kv, kv_len_);
  wave_.blocks_per_group = span.kv_block_end - span.kv_block_begin;
  wave_.load = span.load;
  wave_.finish = span.finish;
  point_state(span);
  plan_jobs(span);
  pack(span);
  run_jobs(parallel_, workers_, static_cast<int64_t>(jobs_.size()), scratch_, sizes_.scratch_bytes,
           [&](int64_t i, unsigned char* scratch) { table_.forward_run(wave_, jobs_[i].job, scratch); });
  run_jobs(parallel_, workers_, static_cast<int64_t>(merges_.size()), scratch_, sizes_.scratch_bytes,
           [&](int64_t i, unsigned char* scratch) { table_.forward_merge(wave_, merges_[i], scratch); });
}

void ForwardCall::run() {
  const double work = static_cast<double>(args_.q.batch() * args_.q.heads()) * static_cast<double>(args_.q.rows()) *
                      static_cast<double>(kv_len_) * static_cast<double>(args_.q.dim() + args_.v.dim());
  workers_ = count_workers(parallel_, sizes_.scratch_bytes, work);
  wave_.tiles = index_.lists();
  wave_.sizes = sizes_;
  if (run_narrow(args_, resources_, index_, wave_, workers_)) return;
  plan_spans();
  Arena count(nullptr);
  lay_out(count);
  Arena arena(resources_.workspace.reserve(static_cast<std::size_t>(count.used())));
  lay_out(arena);
  for (const Span& span : spans_) run_span(span);
}

}  // namespace

void run_forward(const ForwardArgs& args, const CallResources& resources) {
  if (!args.fixed_order && is_decoding(args)) return run_decode(args, resources);
  ForwardSizes sizes{};
  resources.table.forward_sizes(args.q.dim(), args.v.dim(), &sizes);
  ForwardCall(args, resources, sizes).run();
}

}  // namespace ringspan::kernel
