#include "ringspan/kernel/narrow_call.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "ringspan/kernel/call_support.h"

namespace ringspan::kernel {
namespace {

// A mask is narrow where a query block meets at most one of so many key blocks, on average.
constexpr int64_t kNarrowShare = 4;
// Blocks of a worker's buffer at most, and that a query block may meet. The buffer is used once from one end to the
// other, so it need not fit a cache; where it begins anew, blocks may be packed twice.
constexpr int64_t kBufferBlocks = 16;
// Units of work for each worker, so that none waits long for the last one.
constexpr int64_t kUnitsPerWorker = 4;
// A shorter unit would pack much of what its neighbours pack.
constexpr int64_t kMinUnitBlocks = 8;

struct BlockRange {
  int64_t begin = 0, end = 0;
};

class NarrowCall {
 public:
  NarrowCall(const ForwardArgs& args, const KernelTable& table, const TileIndex& index, const ForwardWave& wave,
             int workers)
      : args_(args),
        table_(table),
        index_(index),
        wave_(wave),
        workers_(workers),
        kv_len_(args.k.rows()),
        kv_blocks_(divide_up(kv_len_, wave.sizes.block_kv)),
        q_blocks_(index.num_q_blocks()) {
    wave_.load = !args.begin;
    wave_.finish = args.finish;
    find_keys();
  }

  bool is_narrow() const {
    return most_met_ <= kBufferBlocks && total_met_ * kNarrowShare <= std::ssize(keys_) * kv_blocks_;
  }
  void run(Workspace& workspace, const Parallel& parallel);

 private:
  // One query block of one head.
  struct Place {
    int64_t batch = 0, head = 0, q_block = 0;
  };
  // A worker's memory, and the wave of the blocks that it has room for.
  struct Buffer {
    unsigned char* scratch = nullptr;
    ForwardWave wave{};
    uint8_t* is_packed = nullptr;
    int64_t first_block = 0;
  };

  int64_t block_bytes() const { return wave_.sizes.k_block_bytes + wave_.sizes.v_block_bytes; }
  void find_keys();
  const BlockRange& keys_of(int64_t batch, int64_t q_block) const { return keys_[batch * q_blocks_ + q_block]; }
  Buffer place(Arena& arena) const;
  void run_unit(int64_t unit, unsigned char* memory) const;
  void pack(Buffer& buffer, const BlockRange& keys) const;
  Ahead ahead_of(const Buffer& buffer, const Place& place, const Place& next) const;

  const ForwardArgs& args_;
  const KernelTable& table_;
  const TileIndex& index_;
  ForwardWave wave_;
  int workers_;
  int64_t kv_len_, kv_blocks_, q_blocks_;
  // From the first key block to the last that each query block keeps a pair with, [batch][query block]; how many that
  // is at most, and of all together.
  std::vector<BlockRange> keys_;
  int64_t most_met_ = 0, total_met_ = 0;
  int64_t buffer_blocks_ = 1, units_per_group_ = 1;
};

void NarrowCall::find_keys() {
  for (int64_t batch = 0; batch < args_.q.batch(); ++batch) {
    for (int64_t q_block = 0; q_block < q_blocks_; ++q_block) {
      int64_t begin = kv_len_, end = 0;
      for (const TileRows& rows : index_.rows_of(batch, q_block)) {
        begin = std::min(begin, rows.col_begin);
        end = std::max(end, rows.col_end);
      }
      BlockRange& keys = keys_.emplace_back();
      if (begin < end) keys = {begin / wave_.sizes.block_kv, divide_up(end, wave_.sizes.block_kv)};
      most_met_ = std::max(most_met_, keys.end - keys.begin);
      total_met_ += keys.end - keys.begin;
    }
  }
}

NarrowCall::Buffer NarrowCall::place(Arena& arena) const {
  Buffer buffer{.scratch = arena.take(wave_.sizes.scratch_bytes), .wave = wave_};
  buffer.wave.packed_k = arena.take(buffer_blocks_ * wave_.sizes.k_block_bytes);
  buffer.wave.packed_v = arena.take(buffer_blocks_ * wave_.sizes.v_block_bytes);
  buffer.wave.v_nonfinite = arena.take(buffer_blocks_);
  buffer.wave.blocks_per_group = buffer_blocks_;
  buffer.is_packed = arena.take(buffer_blocks_);
  return buffer;
}

void NarrowCall::pack(Buffer& buffer, const BlockRange& keys) const {
  const bool fits = keys.begin >= buffer.first_block && keys.end <= buffer.first_block + buffer_blocks_;
  if (!fits) {
    std::memset(buffer.is_packed, 0, static_cast<std::size_t>(buffer_blocks_));
    buffer.first_block = keys.begin;
    buffer.wave.kv_begin = keys.begin * wave_.sizes.block_kv;
    buffer.wave.kv_end = std::min(buffer.wave.kv_begin + buffer_blocks_ * wave_.sizes.block_kv, kv_len_);
  }
  for (int64_t block = keys.begin - buffer.first_block; block < keys.end - buffer.first_block; ++block) {
    if (buffer.is_packed[block]) continue;
    table_.forward_pack(buffer.wave, 0, block, buffer.scratch);
    buffer.is_packed[block] = 1;
  }
}

// What the next query block reads and writes. A worker's keys come from memory only once, and mostly in time.
Ahead NarrowCall::ahead_of(const Buffer& buffer, const Place& place, const Place& next) const {
  // About as many register tiles as the query block has, of which masks leave half or more.
  constexpr int64_t kPairsOfTile = 512;
  int64_t tiles = 1;
  for (const TileRows& rows : index_.rows_of(place.batch, place.q_block)) {
    tiles += (rows.row_end - rows.row_begin) * (rows.col_end - rows.col_begin) / kPairsOfTile;
  }
  const auto rows_of = [&](const RawView& view, int64_t head, int64_t begin, int64_t end) {
    return AheadRows{.next = view.data + next.batch * view.stride[0] + head * view.stride[1] + begin * view.stride[2],
                     .stride = view.stride[2],
                     .bytes = view.dim * size_of(static_cast<DType>(view.element)),
                     .count = end - begin,
                     .at_once = divide_up(end - begin, tiles)};
  };
  Ahead ahead{};
  const int64_t q_begin = next.q_block * wave_.sizes.block_q;
  const int64_t q_end = std::min(q_begin + wave_.sizes.block_q, args_.q.rows());
  ahead.rows[0] = rows_of(wave_.q, next.head, q_begin, q_end);
  if (wave_.finish) ahead.rows[1] = rows_of(wave_.out, next.head, q_begin, q_end);
  if (next.q_block == place.q_block) return ahead;
  BlockRange keys = keys_of(next.batch, next.q_block);
  const auto is_here = [&](int64_t block) {
    const int64_t index = block - buffer.first_block;
    return index >= 0 && index < buffer_blocks_ && buffer.is_packed[index];
  };
  while (keys.begin < keys.end && is_here(keys.begin)) ++keys.begin;
  const int64_t kv_begin = keys.begin * wave_.sizes.block_kv, kv_head = next.head / wave_.heads_per_kv;
  const int64_t kv_end = std::max(std::min(keys.end * wave_.sizes.block_kv, kv_len_), kv_begin);
  ahead.rows[2] = rows_of(wave_.k, kv_head, kv_begin, kv_end);
  ahead.rows[3] = rows_of(wave_.v, kv_head, kv_begin, kv_end);
  return ahead;
}

void NarrowCall::run_unit(int64_t unit, unsigned char* memory) const {
  Arena arena(reinterpret_cast<std::byte*>(memory));
  Buffer buffer = place(arena);
  buffer.first_block = kv_blocks_;  // nothing fits yet
  const int64_t group = unit / units_per_group_, part = unit % units_per_group_;
  buffer.wave.first_group = group;
  const int64_t batch = group / wave_.kv_heads, first_head = group % wave_.kv_heads * wave_.heads_per_kv;
  const int64_t end = q_blocks_ * (part + 1) / units_per_group_;
  for (int64_t q_block = q_blocks_ * part / units_per_group_; q_block < end; ++q_block) {
    const BlockRange keys = keys_of(batch, q_block);
    const bool is_empty = keys.begin == keys.end;
    // Nothing to add, and the rows neither begin nor end here.
    if (is_empty && wave_.load && !wave_.finish) continue;
    if (!is_empty) pack(buffer, keys);
    for (int64_t head = first_head; head < first_head + wave_.heads_per_kv; ++head) {
      const bool is_last = head + 1 == first_head + wave_.heads_per_kv;
      const Place place{batch, head, q_block};
      const Place next{batch, is_last ? first_head : head + 1, q_block + (is_last ? 1 : 0)};
      Ahead ahead{};
      if (next.q_block < end) ahead = ahead_of(buffer, place, next);
      const ForwardJob job{batch, head, q_block, buffer.wave.kv_begin, buffer.wave.kv_end, nullptr, &ahead};
      table_.forward_run(buffer.wave, job, buffer.scratch);
    }
  }
}

void NarrowCall::run(Workspace& workspace, const Parallel& parallel) {
  const int64_t fit = kPackedBytes / block_bytes();
  buffer_blocks_ = std::max(std::min(kBufferBlocks, fit / workers_), std::max<int64_t>(most_met_, 1));
  workers_ = static_cast<int>(std::clamp<int64_t>(fit / buffer_blocks_, 1, workers_));
  const int64_t groups = args_.q.batch() * wave_.kv_heads;
  units_per_group_ = std::clamp<int64_t>(divide_up(workers_ == 1 ? 1 : workers_ * kUnitsPerWorker, groups), 1,
                                         std::max<int64_t>(q_blocks_ / kMinUnitBlocks, 1));
  Arena worker(nullptr);
  place(worker);
  auto* memory =
      reinterpret_cast<unsigned char*>(workspace.reserve(static_cast<std::size_t>(workers_ * worker.used())));
  run_jobs(parallel, workers_, groups * units_per_group_, memory, worker.used(),
           [this](int64_t unit, unsigned char* part) { run_unit(unit, part); });
}

}  // namespace

bool run_narrow(const ForwardArgs& args, const KernelTable& table, const TileIndex& index, const ForwardWave& wave,
                int workers, Workspace& workspace, const Parallel& parallel) {
  // Sizes and tiles decide, never the threads: with few jobs waves split them along the keys, which the bits show.
  if (args.q.batch() * args.q.heads() * index.num_q_blocks() < kEnoughJobs) return false;
  NarrowCall call(args, table, index, wave, workers);
  if (!call.is_narrow()) return false;
  call.run(workspace, parallel);
  return true;
}

}  // namespace ringspan::kernel
