// A forward call whose query blocks meet few keys each (windows, packed documents). What a block of keys is packed for
// is soon over: then the memory that waves write and read again is dearer than the products. Here a worker takes a run
// of query blocks of one key/value head and packs keys for itself, just before the first query block that needs them.
//
//     q blocks   0 . . . . .          keys that are packed before   0: A, half of B   1: the rest of B, half of C
//                1 . . . .                                          2: the rest of C
//                    2 . . .
//     key blocks   A   B   C          buffer of the worker   | A | B |   C takes A's place
//
// The buffer is as large as what one query block meets, so that it stays in the cache. Beside each register tile some
// rows that the next query block reads are fetched there too. Which worker packs what changes no bits: blocks of keys
// begin at the same rows, and every query block meets all of its keys in one job, in ascending order.
#include <algorithm>
#include <cstring>
#include <vector>

#include "ringspan/kernel/call_support.h"

namespace ringspan::kernel {
namespace {

// A mask is narrow where a query block meets at most one of so many key blocks, on average.
constexpr int64_t kNarrowShare = 4;
// Key blocks that a query block may meet: a worker's buffer has room for them.
constexpr int64_t kMostMet = 16;
// About as many of a query block's register tiles compute something where a mask leaves half of them or more.
constexpr int64_t kPairsPerTile = 512;
// Units of work for each worker, so that none waits long for the last one.
constexpr int64_t kUnitsPerWorker = 4;
// A shorter unit would pack much of what its neighbours pack.
constexpr int64_t kMinUnitBlocks = 8;

// The part of a block of keys that a slot of the buffer holds.
struct Held {
  int64_t block;
  KvRange rows;  // counted from the block's first
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
    return most_met_ <= kMostMet && total_met_ * kNarrowShare <= std::ssize(keys_) * kv_blocks_;
  }
  void run(Workspace& workspace, const Parallel& parallel);

 private:
  // One query block of one head.
  struct BlockIndex {
    int64_t batch = 0, head = 0, q_block = 0;
  };
  // A worker's memory. Key block i lies in slot i % buffer_blocks_.
  struct Buffer {
    unsigned char* scratch = nullptr;
    ForwardWave wave{};
    Held* held = nullptr;
  };

  int64_t block_bytes() const { return wave_.sizes.k_block_bytes + wave_.sizes.v_block_bytes; }
  void find_keys();
  const KvRange& keys_of(int64_t batch, int64_t q_block) const { return keys_[batch * q_blocks_ + q_block]; }
  Buffer lay_out(Arena& arena) const;
  void run_unit(int64_t unit, unsigned char* memory) const;
  KvRange rows_in(int64_t block, const KvRange& keys) const;
  void pack(Buffer& buffer, const KvRange& keys) const;
  KvRange missing_keys(const Buffer& buffer, int64_t batch, int64_t q_block) const;
  Ahead ahead_of(const Buffer& buffer, const BlockIndex& now, const BlockIndex& next) const;

  const ForwardArgs& args_;
  const KernelTable& table_;
  const TileIndex& index_;
  ForwardWave wave_;
  int workers_;
  int64_t kv_len_, kv_blocks_, q_blocks_;
  // From the first key to the last that each query block keeps a pair with, [batch][query block]; in how many blocks
  // they lie at most, and all together.
  std::vector<KvRange> keys_;
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
      keys_.push_back({std::min(begin, end), end});
      const int64_t met = divide_up(end, wave_.sizes.block_kv) - keys_.back().begin / wave_.sizes.block_kv;
      most_met_ = std::max(most_met_, met);
      total_met_ += met;
    }
  }
}

NarrowCall::Buffer NarrowCall::lay_out(Arena& arena) const {
  Buffer buffer{.scratch = arena.take(wave_.sizes.scratch_bytes), .wave = wave_};
  buffer.wave.packed_k = arena.take(buffer_blocks_ * wave_.sizes.k_block_bytes);
  buffer.wave.packed_v = arena.take(buffer_blocks_ * wave_.sizes.v_block_bytes);
  buffer.wave.v_nonfinite = arena.take(buffer_blocks_);
  buffer.wave.blocks_per_group = buffer_blocks_;
  buffer.wave.kv_begin = 0;
  buffer.wave.kv_end = kv_len_;
  buffer.held = reinterpret_cast<Held*>(arena.take(buffer_blocks_ * static_cast<int64_t>(sizeof(Held))));
  return buffer;
}

// Of `keys`, the rows of one block, counted from its first.
KvRange NarrowCall::rows_in(int64_t block, const KvRange& keys) const {
  const int64_t base = block * wave_.sizes.block_kv, panel = wave_.sizes.panel_kv;
  return {std::max<int64_t>(keys.begin - base, 0) / panel * panel,
          std::min(divide_up(keys.end - base, panel) * panel, wave_.sizes.block_kv)};
}

void NarrowCall::pack(Buffer& buffer, const KvRange& keys) const {
  for (int64_t block = keys.begin / wave_.sizes.block_kv; block < divide_up(keys.end, wave_.sizes.block_kv); ++block) {
    const KvRange rows = rows_in(block, keys);
    const int64_t slot = block % buffer_blocks_;
    Held& held = buffer.held[slot];
    if (held.block != block) {
      held = {block, {rows.begin, rows.begin}};
      buffer.wave.v_nonfinite[slot] = 0;
    }
    const KvRange missing[] = {{rows.begin, held.rows.begin}, {held.rows.end, rows.end}};
    for (const KvRange& part : missing) {
      if (part.begin >= part.end) continue;
      if (table_.forward_pack(buffer.wave, 0, block, part, buffer.scratch)) buffer.wave.v_nonfinite[slot] = 1;
    }
    held.rows = {std::min(rows.begin, held.rows.begin), std::max(rows.end, held.rows.end)};
  }
}

// What the next query block reads: its rows, and its share of the keys that the query block after this one meets first.
Ahead NarrowCall::ahead_of(const Buffer& buffer, const BlockIndex& now, const BlockIndex& next) const {
  const auto rows_of = [&](const RawView& view, int64_t head, const KvRange& rows) {
    return AheadRows{
        .next = view.data + next.batch * view.stride[0] + head * view.stride[1] + rows.begin * view.stride[2],
        .stride = view.stride[2],
        .bytes = view.dim * size_of(static_cast<DType>(view.element)),
        .count = rows.end - rows.begin};
  };
  const int64_t q_begin = next.q_block * wave_.sizes.block_q;
  const KvRange q{q_begin, std::min(q_begin + wave_.sizes.block_q, args_.q.rows())};
  const KvRange missing = missing_keys(buffer, next.batch, now.q_block + 1);
  const int64_t kv_head = next.head / wave_.heads_per_kv, share = now.head % wave_.heads_per_kv;
  const auto part_end = [&](int64_t i) {
    return missing.begin + (missing.end - missing.begin) * i / wave_.heads_per_kv;
  };
  const KvRange keys{part_end(share), part_end(share + 1)};
  Ahead ahead{.q = rows_of(wave_.q, next.head, q),
              .k = rows_of(wave_.k, kv_head, keys),
              .v = rows_of(wave_.v, kv_head, keys),
              .lines_per_tile = 0};
  int64_t lines = 0, tiles = 1;
  for (const AheadRows* rows : {&ahead.q, &ahead.k, &ahead.v}) {
    lines += rows->count * divide_up(rows->bytes, kCacheLine);
  }
  for (const TileRows& rows : index_.rows_of(now.batch, now.q_block)) {
    tiles += (rows.row_end - rows.row_begin) * (rows.col_end - rows.col_begin) / kPairsPerTile;
  }
  ahead.lines_per_tile = divide_up(lines, tiles);
  return ahead;
}

// The keys of a query block that the buffer will lack once the query block before it is done.
KvRange NarrowCall::missing_keys(const Buffer& buffer, int64_t batch, int64_t q_block) const {
  if (q_block >= q_blocks_) return {0, 0};
  KvRange keys = keys_of(batch, q_block);
  const int64_t end = divide_up(keys.end, wave_.sizes.block_kv);
  for (int64_t block = keys.begin / wave_.sizes.block_kv; block < end; ++block) {
    const Held& held = buffer.held[block % buffer_blocks_];
    if (held.block != block) break;
    keys.begin = std::max(keys.begin, block * wave_.sizes.block_kv + held.rows.end);
  }
  return {std::min(keys.begin, keys.end), keys.end};
}

void NarrowCall::run_unit(int64_t unit, unsigned char* memory) const {
  Arena arena(reinterpret_cast<std::byte*>(memory));
  Buffer buffer = lay_out(arena);
  std::fill_n(buffer.held, buffer_blocks_, Held{-1, {0, 0}});
  const int64_t group = unit / units_per_group_, part = unit % units_per_group_;
  buffer.wave.first_group = group;
  const int64_t batch = group / wave_.kv_heads, first_head = group % wave_.kv_heads * wave_.heads_per_kv;
  const int64_t end = q_blocks_ * (part + 1) / units_per_group_;
  for (int64_t q_block = q_blocks_ * part / units_per_group_; q_block < end; ++q_block) {
    const KvRange keys = keys_of(batch, q_block);
    const bool is_empty = keys.begin == keys.end;
    // Nothing to add, and the rows neither begin nor end here.
    if (is_empty && wave_.load && !wave_.finish) continue;
    if (!is_empty) pack(buffer, keys);
    for (int64_t head = first_head; head < first_head + wave_.heads_per_kv; ++head) {
      const bool is_last = head + 1 == first_head + wave_.heads_per_kv;
      const BlockIndex now{batch, head, q_block};
      const BlockIndex next{batch, is_last ? first_head : head + 1, q_block + (is_last ? 1 : 0)};
      Ahead ahead{};
      if (next.q_block < end) ahead = ahead_of(buffer, now, next);
      const ForwardJob job{batch, head, q_block, buffer.wave.kv_begin, buffer.wave.kv_end, nullptr, &ahead};
      table_.forward_run(buffer.wave, job, buffer.scratch);
    }
  }
}

void NarrowCall::run(Workspace& workspace, const Parallel& parallel) {
  const int64_t fit = kPackedBytes / block_bytes();
  buffer_blocks_ = std::max<int64_t>(most_met_, 1);
  workers_ = static_cast<int>(std::clamp<int64_t>(fit / buffer_blocks_, 1, workers_));
  const int64_t groups = args_.q.batch() * wave_.kv_heads;
  units_per_group_ = std::clamp<int64_t>(divide_up(workers_ == 1 ? 1 : workers_ * kUnitsPerWorker, groups), 1,
                                         std::max<int64_t>(q_blocks_ / kMinUnitBlocks, 1));
  Arena worker(nullptr);
  lay_out(worker);
  auto* memory =
      reinterpret_cast<unsigned char*>(workspace.reserve(static_cast<std::size_t>(workers_ * worker.used())));
  run_jobs(parallel, workers_, groups * units_per_group_, memory, worker.used(),
           [this](int64_t unit, unsigned char* part) { run_unit(unit, part); });
}

}  // namespace

bool run_narrow(const ForwardArgs& args, const CallResources& resources, const TileIndex& index,
                const ForwardWave& wave, int workers) {
  // Sizes and tiles decide, never the threads: with few jobs waves split them along the keys, which the bits show.
  if (args.q.batch() * args.q.heads() * index.num_q_blocks() < kEnoughJobs) return false;
  NarrowCall call(args, resources.table, index, wave, workers);
  if (!call.is_narrow()) return false;
  call.run(resources.workspace, resources.parallel);
  return true;
}

}  // namespace ringspan::kernel
