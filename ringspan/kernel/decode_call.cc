// A forward call with few query rows per key/value head (decoding), see decode-inl.h.
#include <algorithm>
#include <vector>

#include "ringspan/kernel/call_support.h"
#include "ringspan/kernel/tile_index.h"

namespace ringspan::kernel {
namespace {

// Per key, packing costs about as much as reading it in place for 32 rows does (fp32, 128 dims: 14 ns a row in place,
// against 6 ns and 150 ns once). A head with 1 or 2 query rows would leave most of a register tile's rows empty.
constexpr int64_t kMostRows = 32;
constexpr int64_t kMostRowsOfHead = 2;
// A part shorter than this costs more in merging than it gains.
constexpr int64_t kMinPartCols = 256;

}  // namespace

bool is_decoding(const ForwardArgs& args) {
  const int64_t rows = args.q.rows() * (args.q.heads() / args.k.heads());
  return args.q.rows() > 0 && (args.q.rows() <= kMostRowsOfHead || rows <= kMostRows);
}

void run_decode(const ForwardArgs& args, const CallResources& resources) {
  const int64_t kv_heads = args.k.heads(), kv_len = args.k.rows(), groups = args.q.batch() * kv_heads;
  const int64_t rows = args.q.rows() * (args.q.heads() / kv_heads);
  const KernelTable& table = resources.table;
  const Parallel& parallel = resources.parallel;
  DecodeSizes sizes{};
  table.decode_sizes(rows, args.q.dim(), args.v.dim(), &sizes);
  const TileIndex index(args.tiles, args.q.batch(), args.q.rows(), kv_len, kMostRows);
  ForwardWave wave = forward_wave(args);
  wave.load = !args.begin;
  wave.finish = args.finish;
  wave.tiles = index.lists();
  wave.sizes.partial_bytes = sizes.partial_bytes;

  const int64_t most_parts = std::min(kv_len / kMinPartCols, kPartialBytes / sizes.partial_bytes);
  const int64_t parts =
      std::clamp<int64_t>(divide_up(kEnoughJobs, std::max<int64_t>(groups, 1)), 1, std::max<int64_t>(most_parts, 1));
  const double work = static_cast<double>(groups * rows) * static_cast<double>(kv_len) *
                      static_cast<double>(args.q.dim() + args.v.dim());
  const int workers = count_workers(parallel, sizes.scratch_bytes, work);
  // As many groups at a time as have room for their parts.
  const int64_t group_bytes = parts * sizes.partial_bytes;
  const int64_t wave_groups = std::clamp<int64_t>(kPartialBytes / group_bytes, 1, std::max<int64_t>(groups, 1));
  const auto lay_out = [&](Arena& arena) {
    wave.partials = arena.take(wave_groups * group_bytes);
    return arena.take(workers * sizes.scratch_bytes);
  };
  Arena count(nullptr);
  lay_out(count);
  Arena arena(resources.workspace.reserve(static_cast<std::size_t>(count.used())));
  unsigned char* scratch = lay_out(arena);

  for (int64_t first = 0; first < groups; first += wave_groups) {
    const int64_t here = std::min(wave_groups, groups - first);
    run_jobs(parallel, workers, here * parts, scratch, sizes.scratch_bytes, [&](int64_t i, unsigned char* memory) {
      const int64_t group = first + i / parts, part = i % parts;
      table.decode_run(wave,
                       {group / kv_heads, group % kv_heads, kv_len * part / parts, kv_len * (part + 1) / parts,
                        wave.partials + i * sizes.partial_bytes},
                       memory);
    });
    run_jobs(parallel, workers, here, scratch, sizes.scratch_bytes, [&](int64_t i, unsigned char* memory) {
      const int64_t group = first + i;
      table.decode_merge(wave, {group / kv_heads, group % kv_heads, wave.partials + i * group_bytes, parts}, memory);
    });
  }
}

}  // namespace ringspan::kernel
