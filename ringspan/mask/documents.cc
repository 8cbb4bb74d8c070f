// Packed documents as bands. A document is a list of runs: neighbouring positions that belong to it.
//
//   ids      1 1 0 2 2 1        document 1 = runs {begin 0, inside 0, length 2}, {begin 5, inside 2, length 1}
//   inside   0 1   0 1 2        document 2 = run  {begin 3, inside 0, length 2}
#include <algorithm>
#include <unordered_map>
#include <utility>

#include "ringspan/base/error.h"
#include "ringspan/mask/mask_spec.h"

namespace ringspan {
namespace {

struct Run {
  int64_t begin = 0;   // position in the sequence
  int64_t inside = 0;  // position in the document
  int64_t length = 0;

  int64_t shift() const { return begin - inside; }
};

using Document = std::vector<Run>;

int64_t length_of(const Document& runs) { return runs.empty() ? 0 : runs.back().inside + runs.back().length; }

void check_rule(const DocumentRule& inside) {
  if (inside.kind != DocumentRule::Kind::kChunked) return;
  RINGSPAN_CHECK(inside.size >= 1, "documents: the chunk size is ", inside.size, "; it must be at least 1");
}

// The mask of one document of n tokens as disjoint bands, in positions counted inside it.
std::vector<Band> bands_inside(int64_t n, const DocumentRule& inside) {
  Band whole{.q_end = n, .kv_end = n};
  switch (inside.kind) {
    case DocumentRule::Kind::kFull: break;
    case DocumentRule::Kind::kCausal: whole.hi = 0; break;
    case DocumentRule::Kind::kWindow:
      if (inside.left >= 0) whole.lo = -std::min(inside.left, n);
      if (inside.right >= 0) whole.hi = std::min(inside.right, n);
      break;
    case DocumentRule::Kind::kChunked: {
      const MaskSpec mask = MaskSpec::chunked(n, n, inside.size, Corner::kTopLeft);
      return {mask.bands(0).begin(), mask.bands(0).end()};
    }
  }
  whole = tighten(whole);
  return whole == Band{} ? std::vector<Band>{} : std::vector<Band>{whole};
}

// The runs that meet [begin, end), in positions of the document.
std::pair<Document::const_iterator, Document::const_iterator> runs_meeting(const Document& runs, int64_t begin,
                                                                           int64_t end) {
  const auto first =
      std::partition_point(runs.begin(), runs.end(), [&](const Run& run) { return run.inside + run.length <= begin; });
  const auto last = std::partition_point(first, runs.end(), [&](const Run& run) { return run.inside < end; });
  return {first, last};
}

// Moves a band of the document to where its runs lie in the sequence: one band per pair of runs that it meets.
void place(const Band& band, const Document& runs, std::vector<Band>& result) {
  const auto [q_first, q_last] = runs_meeting(runs, band.q_begin, band.q_end);
  for (auto q = q_first; q != q_last; ++q) {
    const int64_t q_begin = std::max(band.q_begin, q->inside);
    const int64_t q_end = std::min(band.q_end, q->inside + q->length);
    const int64_t kv_begin = std::max(band.kv_begin, q_begin + band.lo);
    const int64_t kv_end = std::min(band.kv_end, q_end + band.hi);
    const auto [kv_first, kv_last] = runs_meeting(runs, kv_begin, kv_end);
    for (auto kv = kv_first; kv != kv_last; ++kv) {
      const int64_t turn = kv->shift() - q->shift();
      const Band piece = tighten({.q_begin = q_begin + q->shift(),
                                  .q_end = q_end + q->shift(),
                                  .kv_begin = std::max(kv_begin, kv->inside) + kv->shift(),
                                  .kv_end = std::min(kv_end, kv->inside + kv->length) + kv->shift(),
                                  .lo = band.lo + turn,
                                  .hi = band.hi + turn});
      if (piece != Band{}) result.push_back(piece);
    }
    if (static_cast<int64_t>(result.size()) > kMaxBands) {
      throw Unsupported(concat("documents: the runs of interleaved documents need more than ", kMaxBands,
                               " bands; sort the tokens by document, so that each lies in few runs"));
    }
  }
}

MaskSpec from_documents(int64_t seq_len, const std::vector<std::vector<Document>>& batches,
                        const DocumentRule& inside) {
  std::vector<std::vector<Band>> lists;
  for (const std::vector<Document>& documents : batches) {
    std::vector<Band>& list = lists.emplace_back();
    for (const Document& runs : documents) {
      for (const Band& band : bands_inside(length_of(runs), inside)) place(band, runs, list);
    }
  }
  return MaskSpec::from_disjoint(seq_len, seq_len, std::move(lists));
}

std::vector<Document> documents_of(const std::vector<int64_t>& ids, size_t batch) {
  std::vector<Document> documents;
  std::unordered_map<int64_t, size_t> index_of;
  const int64_t seq_len = static_cast<int64_t>(ids.size());
  int64_t begin = 0;
  while (begin < seq_len) {
    const int64_t id = ids[begin];
    RINGSPAN_CHECK(id >= 0, "documents: ids[", batch, "][", begin, "] is ", id,
                   "; ids start at 1, and 0 marks padding");
    int64_t end = begin + 1;
    while (end < seq_len && ids[end] == id) ++end;
    if (id != 0) {
      const auto [entry, is_new] = index_of.try_emplace(id, documents.size());
      if (is_new) documents.emplace_back();
      Document& runs = documents[entry->second];
      runs.push_back({.begin = begin, .inside = length_of(runs), .length = end - begin});
    }
    begin = end;
  }
  return documents;
}

}  // namespace

MaskSpec documents_by_ids(const std::vector<std::vector<int64_t>>& ids, const DocumentRule& inside) {
  RINGSPAN_CHECK(!ids.empty(), "documents: there is no list of ids; give one per batch entry, or one for all");
  check_rule(inside);
  std::vector<std::vector<Document>> batches;
  for (size_t b = 0; b < ids.size(); ++b) {
    RINGSPAN_CHECK(ids[b].size() == ids[0].size(), "documents: ids[", b, "] has ", ids[b].size(),
                   " positions and ids[0] has ", ids[0].size(), "; all batch entries have the same length");
    batches.push_back(documents_of(ids[b], b));
  }
  return from_documents(static_cast<int64_t>(ids[0].size()), batches, inside);
}

MaskSpec documents_by_lengths(int64_t seq_len, const std::vector<std::vector<int64_t>>& lengths,
                              const DocumentRule& inside) {
  RINGSPAN_CHECK(0 <= seq_len && seq_len <= kMaxLength, "documents: seq_len is ", seq_len, "; it must be in 0..",
                 kMaxLength);
  RINGSPAN_CHECK(!lengths.empty(), "documents: there is no list of lengths; give one per batch entry, or one for all");
  check_rule(inside);
  std::vector<std::vector<Document>> batches;
  for (size_t b = 0; b < lengths.size(); ++b) {
    std::vector<Document>& documents = batches.emplace_back();
    int64_t begin = 0;
    for (size_t d = 0; d < lengths[b].size(); ++d) {
      const int64_t length = lengths[b][d];
      RINGSPAN_CHECK(length >= 0, "documents: lengths[", b, "][", d, "] is ", length, "; it must be at least 0");
      RINGSPAN_CHECK(length <= seq_len - begin, "documents: lengths[", b, "] reaches position ", begin, " + ", length,
                     " but the sequence has ", seq_len, "; shorten the documents or lengthen the sequence");
      if (length > 0) documents.push_back({{.begin = begin, .inside = 0, .length = length}});
      begin += length;
    }
  }
  return from_documents(seq_len, batches, inside);
}

}  // namespace ringspan
