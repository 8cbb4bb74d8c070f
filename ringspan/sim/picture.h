// Picture: a plan to look at. The mask in cells, with the ranks that hold them, and beside it the work or the time of
// some ranks; written as JSON, which python/ringspan/picture.py draws.
//
//     causal, 256 positions in 128 cells of two, head_tail on 2 ranks: the first and the last cells
//              K/V held by   0 0 .. 0
//     queries held by    0   3 . .. .       3 of a cell's 4 pairs are kept
//                        0   4 3 .. .
//                       ..
//                        0   4 4 .. 3
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringspan/mask/mask_spec.h"
#include "ringspan/plan/plan.h"
#include "ringspan/shard/shard_map.h"
#include "ringspan/sim/simulate.h"

namespace ringspan {

struct CellOwner {
  int64_t rank = 0;
  int64_t positions = 0;  // of the cell
  bool operator==(const CellOwner&) const = default;
};

// Cell c is the positions [begins[c], begins[c + 1]). Owners are in the order of their first position in it; none
// where nobody holds the cell.
struct CellAxis {
  std::vector<int64_t> begins;
  std::vector<std::vector<CellOwner>> owners;

  int64_t num_cells() const { return static_cast<int64_t>(owners.size()); }
};

struct MaskPicture {
  CellAxis q, kv;
  std::vector<std::vector<int64_t>> kept;  // pairs, [cell of q][cell of kv]
};

// Of one batch entry. At most 128 cells a side, and 32 where a map deals out every other position: more could not be
// told apart. Cost: near the number of bands and of the cells that each meets, and of segments.
MaskPicture picture_of(const MaskSpec& mask, const ShardMap& q_map, const ShardMap& kv_map, int64_t batch = 0);

// The ranks whose steps are shown: at most 32, evenly chosen.
std::vector<int64_t> pictured_ranks(int64_t world);

// {"schedule":, "world":, "problem":, "note":, "batch":, "mask": {"q": {"begins":, "owners": [[[rank, positions]]]},
// "kv":, "kept":}, "ranks":, "pairs": [[of each forward step]]}. `note` says what else the reader should know.
std::string picture_json(const Plan& plan, const std::string& note);
// Without "pairs", but with "times": {"machine":, "forward": {"seconds":, "end": of the last rank, "ranks": [{"end":,
// "steps":}]}, "backward":} in the order of "ranks". Error unless the simulation kept the steps of pictured_ranks
// (SimulateOptions::steps_of).
std::string picture_json(const Plan& plan, const Simulation& simulation, const Machine& machine,
                         const std::string& note);

}  // namespace ringspan
