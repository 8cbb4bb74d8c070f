#include "ringspan/mask/mask_spec.h"

#include <algorithm>
#include <utility>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

void check_length(const char* name, int64_t length) {
  RINGSPAN_CHECK(0 <= length && length <= kMaxLength, "mask: ", name, " is ", length, "; it must be in 0..",
                 kMaxLength);
}

int64_t shift_of(int64_t q_len, int64_t kv_len, Corner corner) {
  return corner == Corner::kBottomRight ? kv_len - q_len : 0;
}

// Within the lengths, and with diagonals that can be added to.
Band clip(Band band, int64_t q_len, int64_t kv_len) {
  band.q_begin = std::max<int64_t>(band.q_begin, 0);
  band.q_end = std::min(band.q_end, q_len);
  band.kv_begin = std::max<int64_t>(band.kv_begin, 0);
  band.kv_end = std::min(band.kv_end, kv_len);
  band.lo = std::clamp(band.lo, -kNoDiagonal, kNoDiagonal);
  band.hi = std::clamp(band.hi, -kNoDiagonal, kNoDiagonal);
  return band;
}

// The number of lists of a result whose operands have one list for all entries or one per entry.
int64_t common_lists(const MaskSpec& a, const MaskSpec& b) {
  RINGSPAN_CHECK(a.q_len() == b.q_len() && a.kv_len() == b.kv_len(), "masks of ", a.q_len(), " x ", a.kv_len(), " and ",
                 b.q_len(), " x ", b.kv_len(), " positions cannot be combined; build both for the same lengths");
  RINGSPAN_CHECK(a.num_lists() == b.num_lists() || a.num_lists() == 1 || b.num_lists() == 1, "masks of ", a.num_lists(),
                 " and ", b.num_lists(),
                 " batch entries cannot be combined; give both the same batch or a single list");
  return std::max(a.num_lists(), b.num_lists());
}

}  // namespace

MaskSpec::MaskSpec(int64_t q_len, int64_t kv_len, std::vector<std::vector<Band>> bands)
    : q_len_(q_len), kv_len_(kv_len), bands_(std::move(bands)) {
  check_length("q_len", q_len);
  check_length("kv_len", kv_len);
  RINGSPAN_CHECK(!bands_.empty(), "mask: there is no list of bands; give one per batch entry, or one for all");
  for (std::vector<Band>& list : bands_) {
    for (Band& band : list) band = clip(band, q_len, kv_len);
    list = make_disjoint(list);
  }
  index_bands();
}

MaskSpec MaskSpec::entries(int64_t begin, int64_t count) const {
  if (num_lists() == 1) return *this;
  RINGSPAN_CHECK(begin >= 0 && count >= 1 && begin + count <= num_lists(), "mask: batch entries ", begin, " to ",
                 begin + count, " of ", num_lists(), " do not exist");
  MaskSpec mask = *this;
  const auto keep = [&](auto& lists) {
    lists.erase(lists.begin() + begin + count, lists.end());
    lists.erase(lists.begin(), lists.begin() + begin);
  };
  keep(mask.bands_);
  keep(mask.reach_);
  return mask;
}

MaskSpec MaskSpec::from_disjoint(int64_t q_len, int64_t kv_len, std::vector<std::vector<Band>> bands) {
  MaskSpec mask;
  mask.q_len_ = q_len;
  mask.kv_len_ = kv_len;
  mask.bands_ = std::move(bands);
  for (std::vector<Band>& list : mask.bands_) {
    const auto key = [](const Band& band) { return std::pair(band.q_begin, band.kv_begin); };
    std::sort(list.begin(), list.end(), [&](const Band& a, const Band& b) { return key(a) < key(b); });
  }
  mask.index_bands();
  return mask;
}

void MaskSpec::index_bands() {
  reach_.clear();
  for (const std::vector<Band>& list : bands_) {
    std::vector<int64_t>& reach = reach_.emplace_back();
    reach.reserve(list.size());
    for (const Band& band : list) reach.push_back(reach.empty() ? band.q_end : std::max(reach.back(), band.q_end));
  }
}

MaskSpec MaskSpec::full(int64_t q_len, int64_t kv_len) {
  return MaskSpec(q_len, kv_len, {{{.q_end = q_len, .kv_end = kv_len}}});
}

MaskSpec MaskSpec::causal(int64_t q_len, int64_t kv_len, Corner corner) { return window(q_len, kv_len, -1, 0, corner); }

MaskSpec MaskSpec::window(int64_t q_len, int64_t kv_len, int64_t left, int64_t right, Corner corner) {
  const int64_t shift = shift_of(q_len, kv_len, corner);
  const int64_t lo = left < 0 ? -kNoDiagonal : shift - std::min(left, kNoDiagonal);
  const int64_t hi = right < 0 ? kNoDiagonal : shift + std::min(right, kNoDiagonal);
  return MaskSpec(q_len, kv_len, {{{.q_end = q_len, .kv_end = kv_len, .lo = lo, .hi = hi}}});
}

MaskSpec MaskSpec::chunked(int64_t q_len, int64_t kv_len, int64_t size, Corner corner) {
  check_length("q_len", q_len);
  check_length("kv_len", kv_len);
  RINGSPAN_CHECK(size >= 1, "mask: the chunk size is ", size, "; it must be at least 1");
  size = std::min(size, 2 * kMaxLength);
  const int64_t shift = shift_of(q_len, kv_len, corner);
  std::vector<Band> bands;
  for (int64_t begin = 0; begin < kv_len; begin += size) {
    bands.push_back({.q_begin = begin - shift,
                     .q_end = begin + size - shift,
                     .kv_begin = begin,
                     .kv_end = begin + size,
                     .hi = shift});
  }
  return MaskSpec(q_len, kv_len, {std::move(bands)});
}

MaskSpec MaskSpec::prefix(int64_t q_len, int64_t kv_len, const std::vector<int64_t>& prefix, Corner corner) {
  const int64_t shift = shift_of(q_len, kv_len, corner);
  std::vector<std::vector<Band>> lists;
  for (size_t b = 0; b < prefix.size(); ++b) {
    RINGSPAN_CHECK(prefix[b] >= 0, "mask: prefix[", b, "] is ", prefix[b], "; it must be at least 0");
    lists.push_back({{.q_end = q_len, .kv_end = kv_len, .hi = shift}, {.q_end = q_len, .kv_end = prefix[b]}});
  }
  return MaskSpec(q_len, kv_len, std::move(lists));
}

std::span<const Band> MaskSpec::bands_meeting(int64_t batch, int64_t begin, int64_t end) const {
  const std::span<const Band> list = bands(batch);
  const std::vector<int64_t>& reach = reach_[num_lists() == 1 ? 0 : batch];
  const auto first = std::upper_bound(reach.begin(), reach.end(), begin) - reach.begin();
  const auto last =
      std::partition_point(list.begin(), list.end(), [end](const Band& band) { return band.q_begin < end; }) -
      list.begin();
  return first < last ? list.subspan(first, last - first) : list.subspan(0, 0);
}

bool MaskSpec::keeps(int64_t batch, int64_t i, int64_t j) const {
  const std::span<const Band> list = bands_meeting(batch, i, i + 1);
  return std::any_of(list.begin(), list.end(), [i, j](const Band& band) { return band.keeps(i, j); });
}

int64_t MaskSpec::count_pairs(int64_t batch) const {
  int64_t total = 0;
  for (const Band& band : bands(batch)) total += ringspan::count_pairs(band);
  return total;
}

MaskSpec operator&(const MaskSpec& a, const MaskSpec& b) {
  const int64_t num_lists = common_lists(a, b);
  std::vector<std::vector<Band>> lists(num_lists);
  for (int64_t batch = 0; batch < num_lists; ++batch) {
    for (const Band& band : a.bands(batch)) {
      for (const Band& other : b.bands_meeting(batch, band.q_begin, band.q_end)) {
        const Band common = intersect(band, other);
        if (common != Band{}) lists[batch].push_back(common);
      }
    }
  }
  return MaskSpec(a.q_len(), a.kv_len(), std::move(lists));
}

MaskSpec operator|(const MaskSpec& a, const MaskSpec& b) {
  const int64_t num_lists = common_lists(a, b);
  std::vector<std::vector<Band>> lists(num_lists);
  for (int64_t batch = 0; batch < num_lists; ++batch) {
    for (const MaskSpec* mask : {&a, &b}) {
      const std::span<const Band> bands = mask->bands(batch);
      lists[batch].insert(lists[batch].end(), bands.begin(), bands.end());
    }
  }
  return MaskSpec(a.q_len(), a.kv_len(), std::move(lists));
}

}  // namespace ringspan
