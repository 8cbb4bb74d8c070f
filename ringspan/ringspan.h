// Everything a C++ program needs to run exact context-parallel attention on the in-process transport or its own. The
// transport over MPI has a header and a library of its own: ringspan/transport/mpi/mpi.h, ringspan::transport_mpi.
// docs/cpp.md is the guide, examples/cpp has whole programs.
//
//   Problem         sizes of the whole call, in tokens and heads; dtype, scale          shape/problem.h
//   MaskSpec        which (query, key) pairs are kept, in positions of the sequence     mask/mask_spec.h
//   ShardMap        which positions each rank holds, in which local rows                shard/shard_map.h
//   build_plan      checks that these fit together: Plan, and Plan::rank(r)             plan/plan.h
//   view_of         the caller's memory, seen as [batch, heads, rows, dim]              view/tensor_view.h
//   Transport       moves bytes between ranks; inproc::run_ranks: ranks as threads      transport/
//   ring_forward    writes out, max, sum, lse of this rank's rows                       ring/ring_attention.h
//   ring_backward   writes dq, dk, dv of this rank's rows                               ring/ring_attention.h
//   ledger_of       bytes, messages, pairs and memory of a part, without running it     ledger/ledger.h
//   Machine         speeds of a place where a plan may run; machine_from_json           sim/machine.h
//   simulate        how long a plan takes on a machine, a model; chrome_trace           sim/simulate.h
//   choose_plan     the fastest schedule, map and mesh on a machine, and why            sim/planner.h
//
// Shapes, N query heads and Nkv key/value heads (Nkv divides N), rows are those of this rank:
//   q, dq           [B, N,   q rows,  Dqk]      dtype of the problem: fp32, bf16, fp16 or fp64
//   k, dk           [B, Nkv, kv rows, Dqk]      the same
//   v, dv           [B, Nkv, kv rows, Dv]       the same
//   out, dout       [B, N,   q rows,  Dv]       the same
//   max, sum, lse   [B, N,   q rows,  1]        fp32; fp64 for fp64. Natural logarithm
// Strides are free (in elements), so every layout is used as it lies; outputs must not overlap.
//
// Errors (base/error.h): Error for a mistake of the caller, before anything is sent; Unsupported, an Error, for what is
// not offered; TransportError where a peer is lost or stalled, after which the transport is to be made anew. Nothing
// else is thrown but what the standard library throws (std::bad_alloc). Nothing is printed.
//
// Threads: ring_forward and ring_backward compute on the Parallel of their options (base/parallel.h), by default on
// the calling thread, and call the transport from the calling thread alone. Different calls on different transports may
// run at the same time; plans are read only.
#pragma once

#include "ringspan/base/dtype.h"
#include "ringspan/base/error.h"
#include "ringspan/base/parallel.h"
#include "ringspan/kernel/attention.h"
#include "ringspan/ledger/ledger.h"
#include "ringspan/mask/mask_spec.h"
#include "ringspan/plan/exchange.h"
#include "ringspan/plan/plan.h"
#include "ringspan/plan/validate.h"
#include "ringspan/ring/ring_attention.h"
#include "ringspan/shape/problem.h"
#include "ringspan/shard/shard_map.h"
#include "ringspan/sim/machine.h"
#include "ringspan/sim/planner.h"
#include "ringspan/sim/simulate.h"
#include "ringspan/softmax/softmax_state.h"
#include "ringspan/transport/inproc/inproc.h"
#include "ringspan/view/tensor_view.h"
