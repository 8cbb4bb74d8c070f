// Everything a C++ program needs to run exact context-parallel attention on the in-process transport or its own.
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
#include "ringspan/softmax/softmax_state.h"
#include "ringspan/transport/inproc/inproc.h"
#include "ringspan/view/tensor_view.h"
