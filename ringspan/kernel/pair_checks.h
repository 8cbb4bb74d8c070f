// Checks of PairInputs before a call: numbers in range, tensors that reach every pair which a tile keeps.
#pragma once

#include <span>

#include "ringspan/kernel/pair_inputs.h"
#include "ringspan/mask/tile.h"

namespace ringspan::kernel {

// Error where a number is out of its range or infinite in the accumulator type `acc`, or a tensor has no data or a
// dtype that does not go with it. Reads no tile.
void check_numbers(const PairInputs& pairs, DType acc);

// check_numbers, and Error where an input does not reach every pair of the tiles. Cost: one look at each
// tile, at each row for a mask by grid, and only where something is given.
void check_pairs(const PairInputs& pairs, const ConstTensorView& q, std::span<const Tile> tiles);

}  // namespace ringspan::kernel
