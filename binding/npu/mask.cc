// Sparse modes, prefix and documents of the contract (2.4 to 2.7) as bands.
//
//     mode   keeps, in a rectangle of Sq x Sk with o = Sk - Sq
//     0      -pre <= j - i <= next, and the mask          4      o - pre <= j - i <= o + next
//     1, 5   the mask                                     6      j - i <= o, or j < prefix
//     2      j <= i                                       7      o - pre <= j - i <= o + next in the last document,
//     3      j <= i + o                                          mode 3 in the others; 8: in the first, mode 2
#include <algorithm>

#include <ATen/ATen.h>

#include "ringspan/base/error.h"

#include "binding/npu/contract.h"

namespace ringspan::binding {
namespace {

constexpr int64_t kOpen = int64_t{1} << 60;

struct Diagonals {
  int64_t lo, hi;
};

// Counted from the first row and column of the rectangle.
Diagonals diagonals_of(int64_t mode, int64_t pre, int64_t next, int64_t q_len, int64_t kv_len) {
  const int64_t o = kv_len - q_len;
  switch (mode) {
    case 0: return {-pre, next};
    case 2: return {-kOpen, 0};
    case 3: return {-kOpen, o};
    case 4: return {o - pre, o + next};
    default: return {-kOpen, kOpen};
  }
}

// The document that modes 7 and 8 treat as a band; documents.size() where all are empty.
size_t band_document(int64_t mode, const std::vector<Document>& documents) {
  const auto has_queries = [](const Document& d) { return d.q_len > 0; };
  if (mode == 8) {
    return std::find_if(documents.begin(), documents.end(), has_queries) - documents.begin();
  }
  const auto last = std::find_if(documents.rbegin(), documents.rend(), has_queries);
  return last == documents.rend() ? documents.size() : documents.rend() - last - 1;
}

int64_t mode_of_document(int64_t mode, bool is_band) {
  if (mode == 7) return is_band ? 4 : 3;
  if (mode == 8) return is_band ? 4 : 2;
  return mode;
}

// Modes 0 and 4 of one rectangle, in terms of its top-left corner (2.5).
void check_band(int64_t p, int64_t n, int64_t q_len, int64_t kv_len) {
  RINGSPAN_CHECK(p >= 0 || n >= 0, "pre_tockens and next_tockens are both negative, ", p, " and ", n,
                 " from the top left; no row would keep a key");
  RINGSPAN_CHECK(p >= 0 || (n >= -p && -p < kv_len), "pre_tockens is ", p, " from the top left, next_tockens ", n,
                 "; next must be at least ", -p, " and there must be more keys than that, not ", kv_len);
  RINGSPAN_CHECK(n >= 0 || (p >= -n && -n < q_len), "next_tockens is ", n, " from the top left, pre_tockens ", p,
                 "; pre must be at least ", -n, " and there must be more queries than that, not ", q_len);
}

void check_document(const ContractArguments& a, const Document& d, bool is_band) {
  const int64_t pre = a.pre_tockens, next = a.next_tockens;
  if (d.q_len == 0 || d.kv_len == 0) return;
  switch (a.sparse_mode) {
    case 0:
      RINGSPAN_CHECK(d.kv_len + pre >= d.q_len, "pre_tockens is ", pre, " and a document has ", d.q_len,
                     " queries and ", d.kv_len, " keys; its last rows would keep nothing");
      break;
    case 4:
      RINGSPAN_CHECK(d.q_len - next <= d.kv_len, "next_tockens is ", next, " and a document has ", d.q_len,
                     " queries and ", d.kv_len, " keys; its first rows would keep nothing");
      break;
    case 3:
    case 7:
      RINGSPAN_CHECK(d.q_len <= d.kv_len, "sparse_mode ", a.sparse_mode, " and a document with ", d.q_len,
                     " queries and ", d.kv_len, " keys; its first rows would keep nothing");
      break;
    default: break;
  }
  if (!is_band || (a.sparse_mode != 7 && a.sparse_mode != 8)) return;
  RINGSPAN_CHECK(pre >= d.kv_len, "pre_tockens is ", pre, "; sparse_mode ", a.sparse_mode, " needs at least the ",
                 d.kv_len, " keys of the band document");
  RINGSPAN_CHECK(d.q_len - next <= d.kv_len, "next_tockens is ", next, " and the band document has ", d.q_len,
                 " queries and ", d.kv_len, " keys; its first rows would keep nothing");
}

void check_prefix(const ContractArguments& a, const ContractSizes& s, int64_t q_len, int64_t kv_len,
                  const std::vector<Document>& documents) {
  const bool wanted = a.sparse_mode == 5 || a.sparse_mode == 6;
  const auto prefix = read_prefix(a);
  const bool given = prefix && !prefix->empty();
  RINGSPAN_CHECK(wanted || !given, "prefix is given and sparse_mode is ", a.sparse_mode, "; it is for modes 5 and 6");
  if (!wanted) return;
  const auto count = static_cast<int64_t>(documents.empty() ? s.batch : static_cast<int64_t>(documents.size()));
  RINGSPAN_CHECK(given, "sparse_mode ", a.sparse_mode, " needs a prefix for each of ", count, " sequences");
  RINGSPAN_CHECK(static_cast<int64_t>(prefix->size()) == count, "prefix has ", prefix->size(), " values for ", count,
                 " sequences");
  for (size_t i = 0; i < prefix->size(); ++i) {
    const int64_t q = documents.empty() ? q_len : documents[i].q_len,
                  k = documents.empty() ? kv_len : documents[i].kv_len;
    const int64_t least = q > k ? 0 : k - q, value = (*prefix)[i];
    RINGSPAN_CHECK(least <= value && value <= k, "prefix[", i, "] is ", value, "; it must be in ", least, "..", k);
  }
}

Band band_of(const Document& d, Diagonals diagonals, int64_t kv_len) {
  const int64_t shift = d.kv_begin - d.q_begin;
  const auto bounded = [&](int64_t value) { return std::clamp(value + shift, -kOpen, kOpen); };
  return {.q_begin = d.q_begin,
          .q_end = d.q_begin + d.q_len,
          .kv_begin = d.kv_begin,
          .kv_end = d.kv_begin + kv_len,
          .lo = bounded(diagonals.lo),
          .hi = bounded(diagonals.hi)};
}

}  // namespace

std::vector<Document> read_documents(const std::vector<int64_t>& q_ends, const std::vector<int64_t>& kv_ends,
                                     int64_t q_len, int64_t kv_len) {
  RINGSPAN_CHECK(!q_ends.empty() && q_ends.size() == kv_ends.size(), "actual_seq_qlen has ", q_ends.size(),
                 " documents and actual_seq_kvlen ", kv_ends.size(), "; they must have the same, at least one");
  std::vector<Document> documents;
  int64_t q = 0, kv = 0, last_q = 0, last_kv = 0;
  for (size_t i = 0; i < q_ends.size(); ++i) {
    RINGSPAN_CHECK(q_ends[i] >= 0 && kv_ends[i] >= 0, "document ", i, " ends at ", q_ends[i], " and ", kv_ends[i],
                   "; ends are not negative");
    // A drop switches a document off.
    const Document d{q, std::max<int64_t>(q_ends[i] - last_q, 0), kv, std::max<int64_t>(kv_ends[i] - last_kv, 0)};
    q += d.q_len;
    kv += d.kv_len;
    last_q = q_ends[i];
    last_kv = kv_ends[i];
    documents.push_back(d);
  }
  RINGSPAN_CHECK(q <= q_len, "actual_seq_qlen holds ", q, " tokens and query ", q_len);
  RINGSPAN_CHECK(kv <= kv_len, "actual_seq_kvlen holds ", kv, " tokens and key ", kv_len);
  return documents;
}

void check_tokens(const ContractArguments& a, const ContractSizes& s, int64_t q_len, int64_t kv_len,
                  const std::vector<Document>& documents) {
  // Without a mask, mode and tokens mean nothing (2.4). A prefix would be lost.
  RINGSPAN_CHECK(a.atten_mask || !a.prefix || a.prefix->empty(), "prefix is given and atten_mask is not");
  if (!a.atten_mask) return;
  const int64_t pre = a.pre_tockens, next = a.next_tockens;
  check_prefix(a, s, q_len, kv_len, documents);
  if (s.layout != Layout::kTND) {
    const int64_t shift = a.sparse_mode == 4 ? q_len - kv_len : 0;
    if (a.sparse_mode == 0 || a.sparse_mode == 4) check_band(pre + shift, next - shift, q_len, kv_len);
    return;
  }
  if (a.sparse_mode == 0) {
    RINGSPAN_CHECK(next >= 0 && (pre >= 0 || next >= -pre), "pre_tockens is ", pre, " and next_tockens ", next,
                   "; with TND next is not negative, and at least -pre");
  }
  if (a.sparse_mode == 4) {
    RINGSPAN_CHECK(pre >= 0 && pre + next >= 0, "pre_tockens is ", pre, " and next_tockens ", next,
                   "; with TND and sparse_mode 4 pre and pre + next are not negative");
  }
  RINGSPAN_CHECK(a.sparse_mode != 7 || next <= 0, "next_tockens is ", next, "; sparse_mode 7 needs at most 0");
  const size_t band = band_document(a.sparse_mode, documents);
  int64_t most_q = 0, most_kv = 0;
  for (size_t i = 0; i < documents.size(); ++i) {
    check_document(a, documents[i], i == band);
    most_q = std::max(most_q, documents[i].q_len);
    most_kv = std::max(most_kv, documents[i].kv_len);
  }
  if (a.sparse_mode > 1) return;
  RINGSPAN_CHECK(a.atten_mask->size(0) == most_q && a.atten_mask->size(1) == most_kv, "atten_mask has shape ",
                 a.atten_mask->sizes(), "; it must be that of the largest document, [", most_q, ", ", most_kv, "]");
}

void fill_mask(const ContractArguments& a, int64_t q_len, int64_t kv_len, ContractCall& call) {
  const bool tnd = call.sizes.layout == Layout::kTND;
  const int64_t mode = a.atten_mask ? a.sparse_mode : 1;
  const bool dense = a.atten_mask && (mode == 0 || mode == 1 || mode == 5);
  if (dense) {
    call.pairs.mask = a.atten_mask;
    call.pairs.mask_means_masked = true;
    call.pairs.mask_by_grid = tnd;
  }
  const std::vector<int64_t> prefix = read_prefix(a).value_or(std::vector<int64_t>());
  if (!tnd && mode == 6) {
    call.mask = {.kind = ContractMask::Kind::kPrefix, .prefix = prefix};
    return;
  }
  if (!tnd && (mode == 1 || mode == 5)) return;  // everything
  call.mask.kind = ContractMask::Kind::kBands;
  std::vector<Band>& bands = call.mask.bands;
  const std::vector<Document> whole = {{0, q_len, 0, kv_len}};
  const std::vector<Document>& documents = tnd ? call.documents : whole;
  const size_t band = band_document(mode, documents);
  for (size_t i = 0; i < documents.size(); ++i) {
    const Document& d = documents[i];
    if (d.q_len == 0 || d.kv_len == 0) continue;
    const int64_t own = mode_of_document(mode, i == band);
    const Diagonals diagonals = diagonals_of(own == 6 ? 3 : own, a.pre_tockens, a.next_tockens, d.q_len, d.kv_len);
    bands.push_back(band_of(d, diagonals, d.kv_len));
    if (own == 6 && prefix[i] > 0) bands.push_back(band_of(d, {-kOpen, kOpen}, prefix[i]));
  }
}

MaskSpec ContractMask::build(int64_t q_len, int64_t kv_len) const {
  switch (kind) {
    case Kind::kPrefix: return MaskSpec::prefix(q_len, kv_len, prefix, Corner::kBottomRight);
    case Kind::kBands: return MaskSpec(q_len, kv_len, {bands});
    default: return MaskSpec::full(q_len, kv_len);
  }
}

}  // namespace ringspan::binding
