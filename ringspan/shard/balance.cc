// Maps that share out work, not tokens.
//
// per_document, documents of 8 and 4 tokens on 2 ranks. A document of n tokens is cut into 2 P = 4 chunks at
// floor(c n / 4); chunks c and 3 - c belong together (a light one and a heavy one):
//
//     position    0 1 2 3 4 5 6 7 | 8 9 10 11
//     chunk       0 0 1 1 2 2 3 3 | 0 1  2  3
//     pairs kept  1 2 3 4 5 6 7 8 | 1 2  3  4        work of the pairs: {0,3} 18, {1,2} 18 | {0,3} 5, {1,2} 5
//     rank        0 0 1 1 1 1 0 0 | 0 1  1  0
//
// With 5 tokens the pairs keep 10 and 5; the heavier pair of the next document then goes to the rank with 5.
//
// balanced, a causal mask over 16 tokens on 2 ranks, 4 chunks a rank. Chunks in the order of their work are dealt out
// forwards and backwards in turn; then chunks are exchanged between the busiest and the idlest rank while that helps:
//
//     chunk (2 tokens)   0  1  2  3  4  5  6  7
//     pairs kept         3  7 11 15 19 23 27 31
//     dealt              0  1  1  0  0  1  1  0      68 and 68
//
// Fewest chunks first, as each one costs tiles; where the goal is not met, twice as many, down to single tokens.
#include <algorithm>
#include <limits>
#include <numeric>

#include "ringspan/base/error.h"
#include "ringspan/shard/shard_map.h"

namespace ringspan {
namespace {

constexpr double kGoal = 1.02;

struct Chunk {
  int64_t begin = 0, end = 0;
  int64_t work = 0;
};

// The largest over the mean; 1 where all are 0.
double imbalance_of(const std::vector<int64_t>& work) {
  const int64_t total = std::accumulate(work.begin(), work.end(), int64_t{0});
  if (total == 0) return 1;
  const double mean = static_cast<double>(total) / static_cast<double>(work.size());
  return static_cast<double>(*std::max_element(work.begin(), work.end())) / mean;
}

// Local rows in the order of positions.
std::vector<Segment> segments_of(std::vector<Chunk> chunks) {
  std::sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) { return a.begin < b.begin; });
  std::vector<Segment> segments;
  int64_t row = 0;
  for (const Chunk& chunk : chunks) {
    segments.push_back({.local_row = row, .begin = chunk.begin, .length = chunk.end - chunk.begin});
    row += chunk.end - chunk.begin;
  }
  return segments;
}

ShardMap map_of(int64_t seq_len, const std::vector<std::vector<Chunk>>& chunks) {
  std::vector<std::vector<Segment>> ranks;
  for (const std::vector<Chunk>& owned : chunks) ranks.push_back(segments_of(owned));
  return ShardMap::from_segments(seq_len, {std::move(ranks)});
}

// Pairs that tokens [0, n) of a document keep causally.
int64_t causal_pairs(int64_t n) { return n * (n + 1) / 2; }

// The P pairs of chunks of one document, heaviest first.
std::vector<std::vector<Chunk>> pairs_of_document(int64_t offset, int64_t length, int64_t world) {
  const auto chunk = [&](int64_t c) {
    const int64_t begin = c * length / (2 * world), end = (c + 1) * length / (2 * world);
    return Chunk{offset + begin, offset + end, causal_pairs(end) - causal_pairs(begin)};
  };
  std::vector<std::vector<Chunk>> pairs;
  for (int64_t c = 0; c < world; ++c) pairs.push_back({chunk(c), chunk(2 * world - 1 - c)});
  std::stable_sort(pairs.begin(), pairs.end(),
                   [](const auto& a, const auto& b) { return a[0].work + a[1].work > b[0].work + b[1].work; });
  return pairs;
}

// What every rank has so far.
class Shares {
 public:
  explicit Shares(int64_t world) : owned_(world), load_(world, 0), tokens_(world, 0) {}

  // One part for each rank, the first for the rank with least work.
  void give(const std::vector<std::vector<Chunk>>& parts) {
    std::vector<int64_t> ranks(parts.size());
    std::iota(ranks.begin(), ranks.end(), int64_t{0});
    std::stable_sort(ranks.begin(), ranks.end(), [&](int64_t a, int64_t b) {
      return load_[a] != load_[b] ? load_[a] < load_[b] : tokens_[a] < tokens_[b];
    });
    for (size_t i = 0; i < parts.size(); ++i) {
      for (const Chunk& chunk : parts[i]) {
        owned_[ranks[i]].push_back(chunk);
        load_[ranks[i]] += chunk.work;
        tokens_[ranks[i]] += chunk.end - chunk.begin;
      }
    }
  }

  const std::vector<std::vector<Chunk>>& owned() const { return owned_; }

 private:
  std::vector<std::vector<Chunk>> owned_;
  std::vector<int64_t> load_, tokens_;
};

// Kept pairs of each query row, all batch entries added up, as running sums: [i] is that of rows 0..i-1.
std::vector<int64_t> work_up_to(const MaskSpec& mask) {
  std::vector<int64_t> sums(mask.q_len() + 1, 0);
  for (int64_t batch = 0; batch < mask.num_lists(); ++batch) {
    for (const Band& band : mask.bands(batch)) {
      for (int64_t i = band.q_begin; i < band.q_end; ++i) {
        const int64_t begin = std::max(band.kv_begin, i + band.lo), end = std::min(band.kv_end, i + band.hi + 1);
        sums[i + 1] += std::max<int64_t>(end - begin, 0);
      }
    }
  }
  std::partial_sum(sums.begin(), sums.end(), sums.begin());
  return sums;
}

// Chunks dealt to ranks, with what each rank has.
class Deal {
 public:
  Deal(std::vector<Chunk> chunks, int64_t world) : owned_(world), load_(world, 0) {
    std::stable_sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) { return a.work > b.work; });
    for (size_t i = 0; i < chunks.size(); ++i) {
      const auto turn = static_cast<int64_t>(i) / world, place = static_cast<int64_t>(i) % world;
      const int64_t rank = turn % 2 == 0 ? place : world - 1 - place;
      owned_[rank].push_back(chunks[i]);
      load_[rank] += chunks[i].work;
    }
  }

  const std::vector<std::vector<Chunk>>& owned() const { return owned_; }

  double imbalance() const { return imbalance_of(load_); }

  // Exchanges chunks of the busiest rank for lighter ones of the idlest, until the goal is met or nothing helps.
  void refine(int64_t most_exchanges) {
    for (int64_t i = 0; i < most_exchanges && imbalance() > kGoal; ++i) {
      const auto busy = std::max_element(load_.begin(), load_.end()) - load_.begin();
      const auto idle = std::min_element(load_.begin(), load_.end()) - load_.begin();
      if (!exchange(busy, idle)) return;
    }
  }

 private:
  // The two chunks whose exchange brings both ranks nearest to each other; false where none does.
  bool exchange(int64_t busy, int64_t idle) {
    const int64_t gap = load_[busy] - load_[idle];
    std::vector<Chunk>&given = owned_[busy], &taken = owned_[idle];
    const auto lighter = [](const Chunk& a, const Chunk& b) { return a.work < b.work; };
    std::sort(taken.begin(), taken.end(), lighter);
    int64_t best_left = gap;
    size_t best_given = 0, best_taken = 0;
    for (size_t g = 0; g < given.size(); ++g) {
      // Half of the gap should move; the neighbours of that value in the other rank are the candidates.
      const Chunk wanted{.work = given[g].work - gap / 2};
      const auto at = std::lower_bound(taken.begin(), taken.end(), wanted, lighter) - taken.begin();
      for (const int64_t t : {at - 1, at, at + 1}) {
        if (t < 0 || t >= static_cast<int64_t>(taken.size())) continue;
        const int64_t moved = given[g].work - taken[t].work;
        const int64_t left = std::abs(gap - 2 * moved);
        if (moved <= 0 || left >= best_left) continue;
        best_left = left;
        best_given = g;
        best_taken = static_cast<size_t>(t);
      }
    }
    if (best_left >= gap) return false;
    const int64_t moved = given[best_given].work - taken[best_taken].work;
    std::swap(given[best_given], taken[best_taken]);
    load_[busy] -= moved;
    load_[idle] += moved;
    return true;
  }

  std::vector<std::vector<Chunk>> owned_;
  std::vector<int64_t> load_;
};

}  // namespace

ShardMap ShardMap::per_document(const std::vector<int64_t>& lengths, int64_t world, std::optional<int64_t> seq_len) {
  RINGSPAN_CHECK(world >= 1, "per_document: the world has ", world, " ranks; it needs at least 1");
  std::vector<int64_t> offsets(1, 0);
  for (size_t d = 0; d < lengths.size(); ++d) {
    RINGSPAN_CHECK(lengths[d] >= 0, "per_document: lengths[", d, "] is ", lengths[d], "; it must be at least 0");
    RINGSPAN_CHECK(lengths[d] <= kMaxLength - offsets.back(), "per_document: lengths up to document ", d,
                   " add up to more than ", kMaxLength);
    offsets.push_back(offsets.back() + lengths[d]);
  }
  const int64_t used = offsets.back(), all = seq_len.value_or(used);
  RINGSPAN_CHECK(used <= all && all <= kMaxLength, "per_document: the documents have ", used, " tokens and seq_len is ",
                 all, "; it must be in ", used, "..", kMaxLength);
  // Long documents first: what they leave uneven, the short ones even out.
  std::vector<size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return lengths[a] > lengths[b]; });
  Shares shares(world);
  for (const size_t d : order) shares.give(pairs_of_document(offsets[d], lengths[d], world));
  std::vector<std::vector<Chunk>> rest;
  for (int64_t c = 0; c < world; ++c) {
    rest.push_back({{used + c * (all - used) / world, used + (c + 1) * (all - used) / world, 0}});
  }
  shares.give(rest);
  return map_of(all, shares.owned());
}

ShardMap ShardMap::balanced(const MaskSpec& mask, int64_t world, int64_t most_chunks) {
  RINGSPAN_CHECK(world >= 1, "balanced: the world has ", world, " ranks; it needs at least 1");
  RINGSPAN_CHECK(mask.q_len() == mask.kv_len(), "balanced: the mask has ", mask.q_len(), " query and ", mask.kv_len(),
                 " key positions; a map that serves both needs them equal");
  const int64_t seq_len = mask.q_len();
  const std::vector<int64_t> sums = work_up_to(mask);
  // Many chunks need few exchanges each, and every one costs a look at all chunks of two ranks.
  constexpr int64_t kMostExchanges = 256;
  std::vector<std::vector<Chunk>> best;
  double reached = std::numeric_limits<double>::infinity();
  for (int64_t per_rank = 2;; per_rank *= 2) {
    const int64_t count = std::min(per_rank * world, std::max<int64_t>(seq_len, 1));
    std::vector<Chunk> chunks;
    for (int64_t c = 0; c < count; ++c) {
      const int64_t begin = c * seq_len / count, end = (c + 1) * seq_len / count;
      chunks.push_back({begin, end, sums[end] - sums[begin]});
    }
    Deal deal(std::move(chunks), world);
    deal.refine(kMostExchanges);
    if (deal.imbalance() < reached) {
      reached = deal.imbalance();
      best = deal.owned();
    }
    if (reached <= kGoal || count >= seq_len || 2 * per_rank > most_chunks) break;
  }
  return map_of(seq_len, best);
}

double ShardMap::imbalance(const MaskSpec& mask) const { return imbalance_of(work(mask)); }

}  // namespace ringspan
