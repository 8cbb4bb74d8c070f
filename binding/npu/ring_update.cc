// ring_attention_update: joins the results of two parts of the keys (contract 4).
//
// The sum is join_parts(). What is the contract's own: an empty side is (-FLT_MAX, +FLT_MAX), and its out may hold
// anything.
#include <cfloat>
#include <string>
#include <tuple>

#include <ATen/ATen.h>

#include "ringspan/base/error.h"
#include "ringspan/softmax/empty_row.h"

#include "binding/base/boxed_op.h"
#include "binding/base/softmax_tensors.h"
#include "binding/base/tensor_rules.h"
#include "binding/base/tensors.h"
#include "binding/npu/call.h"
#include "binding/npu/stats.h"

namespace ringspan::binding {
namespace {

using at::Tensor;
using std::string;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

struct Side {
  Tensor out, max, sum;
};

struct UpdateCall {
  Side prev, cur;
  std::optional<Tensor> ends;
  string layout, softmax_layout;

  static void fields(auto& self, auto&& visit) {
    visit(FieldInfo{"prev_attn_out"}, self.prev.out);
    visit(FieldInfo{"prev_softmax_max"}, self.prev.max);
    visit(FieldInfo{"prev_softmax_sum"}, self.prev.sum);
    visit(FieldInfo{"cur_attn_out"}, self.cur.out);
    visit(FieldInfo{"cur_softmax_max"}, self.cur.max);
    visit(FieldInfo{"cur_softmax_sum"}, self.cur.sum);
    visit(FieldInfo{"actual_seq_qlen", "None", Compare::kNever, DtypeRule::kHost}, self.ends);
    visit(FieldInfo{"input_layout", "\"SBH\""}, self.layout);
    visit(FieldInfo{"input_softmax_layout", "\"\""}, self.softmax_layout);
  }
};

void check_side(const char* name, const Side& side) {
  const at::ScalarType dtype = side.out.scalar_type();
  RINGSPAN_CHECK(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat, name, "_attn_out is ",
                 toString(dtype), "; it must be Half, BFloat16 or Float");
  RINGSPAN_CHECK(side.out.dim() == 3, name, "_attn_out has ", side.out.dim(), " dimensions; it must have 3");
  for (const auto& [what, stats] : {std::pair("_softmax_max", &side.max), std::pair("_softmax_sum", &side.sum)}) {
    RINGSPAN_CHECK(stats->scalar_type() == at::kFloat, name, what, " is ", toString(stats->scalar_type()),
                   "; it must be Float");
    RINGSPAN_CHECK(stats->dim() > 0 && stats->size(-1) == kStatSlots, name, what, " has shape ", stats->sizes(),
                   "; its last size must be ", kStatSlots);
  }
}

void check_pair(const char* what, const Tensor& prev, const Tensor& cur) {
  RINGSPAN_CHECK(prev.sizes() == cur.sizes() && prev.scalar_type() == cur.scalar_type(), what, " is ",
                 toString(prev.scalar_type()), " ", prev.sizes(), " before and ", toString(cur.scalar_type()), " ",
                 cur.sizes(), " now; they must be alike");
}

// Documents of running ends that begin with 0 and end with `tokens`.
std::vector<Document> documents_of(const std::optional<Tensor>& ends, int64_t tokens) {
  RINGSPAN_CHECK(ends, "TND needs actual_seq_qlen");
  RINGSPAN_CHECK(ends->scalar_type() == at::kLong, "actual_seq_qlen is ", toString(ends->scalar_type()),
                 "; it must be Long");
  const std::vector<int64_t> values = read_ends("actual_seq_qlen", *ends);
  RINGSPAN_CHECK(values.front() == 0 && values.back() == tokens, "actual_seq_qlen goes from ", values.front(), " to ",
                 values.back(), "; it must go from 0 to the ", tokens, " tokens");
  std::vector<Document> documents;
  for (size_t i = 1; i < values.size(); ++i) {
    RINGSPAN_CHECK(values[i] >= values[i - 1], "actual_seq_qlen falls from ", values[i - 1], " to ", values[i]);
    documents.push_back({values[i - 1], values[i] - values[i - 1], 0, 0});
  }
  return documents;
}

void check_stats_shape(const Side& side, at::IntArrayRef want) {
  RINGSPAN_CHECK(side.max.sizes() == want, "prev_softmax_max has shape ", side.max.sizes(), "; it must be ", want);
}

// How the rows of the statistics lie along attn_out.
struct Rows {
  bool is_sbh = true;
  bool by_documents = false;
  std::vector<Document> documents{};
  int64_t heads = 0;
};

Rows read_rows(const Side& prev, const std::optional<Tensor>& ends, const string& layout,
               const string& softmax_layout) {
  RINGSPAN_CHECK(layout == "SBH" || layout == "TND", "input_layout is \"", layout, "\"; it must be SBH or TND");
  RINGSPAN_CHECK(softmax_layout.empty() || softmax_layout == "SBH" || softmax_layout == "TND",
                 "input_softmax_layout is \"", softmax_layout, "\"; it must be \"\", SBH or TND");
  const Tensor &out = prev.out, &max = prev.max;
  Rows rows{.is_sbh = layout == "SBH"};
  if (rows.is_sbh) {
    RINGSPAN_CHECK(max.dim() == 4, "prev_softmax_max has ", max.dim(), " dimensions; with SBH it has 4");
    rows.heads = max.size(1);
    RINGSPAN_CHECK(rows.heads > 0 && out.size(2) % rows.heads == 0, "attn_out has H = ", out.size(2), ", which the ",
                   rows.heads, " heads of the statistics do not divide");
    check_stats_shape(prev, {out.size(1), rows.heads, out.size(0), kStatSlots});
    return rows;
  }
  RINGSPAN_CHECK(max.dim() == 3, "prev_softmax_max has ", max.dim(), " dimensions; with TND it has 3");
  rows.heads = out.size(1);
  check_stats_shape(prev, {out.size(0), rows.heads, kStatSlots});
  RINGSPAN_CHECK(ends, "TND needs actual_seq_qlen");
  rows.by_documents = softmax_layout != "TND";
  if (rows.by_documents) rows.documents = documents_of(ends, out.size(0));
  return rows;
}

// attn_out with its heads apart, [S, B, N, D] or [T, N, D].
Tensor heads_apart(const Tensor& out, const Rows& rows) {
  return rows.is_sbh ? out.unflatten(2, {rows.heads, out.size(2) / rows.heads}) : out;
}

// Slot 0 of every row, along heads_apart: [S, B, N, 1] or [T, N, 1].
Tensor along_rows(const Tensor& stats, const Rows& rows) {
  if (rows.is_sbh) return stats.select(-1, 0).permute({2, 0, 1}).unsqueeze(-1);
  const Tensor in_order = rows.by_documents ? from_document_order(stats, rows.documents).transpose(0, 1) : stats;
  return in_order.select(-1, 0).unsqueeze(-1);
}

ThreeTensors update(const Side& prev, const Side& cur, const Rows& rows) {
  const Tensor no_prev = is_empty_row(prev.max, prev.sum), no_cur = is_empty_row(cur.max, cur.sum);
  const Tensor none = at::logical_and(no_prev, no_cur);
  const auto filled = [&](const Tensor& where, double value, const Tensor& other) {
    return at::where(where, at::scalar_tensor(value, other.options()), other);
  };
  const JoinedParts joined = join_parts(filled(no_prev, kEmptyRowMax, prev.max), filled(no_prev, 0, prev.sum),
                                        filled(no_cur, kEmptyRowMax, cur.max), filled(no_cur, 0, cur.sum));
  const auto out_of = [&](const Side& side, const Tensor& is_empty, const Tensor& share) {
    const Tensor weighed = heads_apart(side.out, rows).to(at::kFloat) * along_rows(share, rows);
    return filled(along_rows(is_empty, rows), 0, weighed);
  };
  const Tensor out = out_of(prev, no_prev, joined.share) + out_of(cur, no_cur, joined.part_share);
  return {out.reshape(prev.out.sizes()).to(prev.out.scalar_type()), filled(none, -FLT_MAX, joined.max),
          filled(none, FLT_MAX, joined.sum)};
}

ThreeTensors ring_update(const UpdateCall& call) {
  return contract_errors([&] {
    check_side("prev", call.prev);
    check_side("cur", call.cur);
    check_pair("attn_out", call.prev.out, call.cur.out);
    for (const Tensor* stats : {&call.prev.sum, &call.cur.max, &call.cur.sum}) {
      check_pair("the softmax statistics", call.prev.max, *stats);
    }
    return update(call.prev, call.cur, read_rows(call.prev, call.ends, call.layout, call.softmax_layout));
  });
}

ThreeTensors ring_update_meta(const UpdateCall& call) {
  contract_errors([&] { check_all_meta(call); });
  return {empty_dense(call.prev.out), empty_dense(call.prev.max), empty_dense(call.prev.sum)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ringspan, m) {
  m.def(
      "ring_attention_update(Tensor prev_attn_out, Tensor prev_softmax_max, Tensor prev_softmax_sum, "
      "Tensor cur_attn_out, Tensor cur_softmax_max, Tensor cur_softmax_sum, *, Tensor? actual_seq_qlen=None, "
      "str input_layout=\"SBH\", str input_softmax_layout=\"\") -> (Tensor attn_out, Tensor softmax_max, "
      "Tensor softmax_sum)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(ringspan, CompositeExplicitAutograd, m) {
  m.impl("ring_attention_update", boxed<UpdateCall, &ring_update>());
}
TORCH_LIBRARY_IMPL(ringspan, Meta, m) { m.impl("ring_attention_update", boxed<UpdateCall, &ring_update_meta>()); }

}  // namespace ringspan::binding
