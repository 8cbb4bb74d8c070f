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
#pragma once

#include "ringspan/kernel/attention.h"
#include "ringspan/kernel/call_support.h"
#include "ringspan/kernel/kernel_abi.h"
#include "ringspan/kernel/tile_index.h"

namespace ringspan::kernel {

// Runs the call and returns true where it is one of these. `wave` has the call's tensors, tiles and sizes.
bool run_narrow(const ForwardArgs& args, const CallResources& resources, const TileIndex& index,
                const ForwardWave& wave, int workers);

}  // namespace ringspan::kernel
