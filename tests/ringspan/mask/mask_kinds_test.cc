// Masks by name: every kind is read as its definition says, and what does not fit is refused with how it is written.
#include "ringspan/mask/mask_kinds.h"

#include <functional>
#include <set>

#include <gtest/gtest.h>

#include "ringspan/base/error.h"

namespace ringspan {
namespace {

constexpr int64_t kLength = 9;
using Keeps = std::function<bool(int64_t i, int64_t j)>;

struct NamedMask {
  const char* text;
  Keeps keeps;
};

// Documents of 3, 0 and 4 tokens, then padding.
int64_t document_of(int64_t i) { return i < 3 ? 1 : i < 7 ? 2 : 0; }
int64_t place_in(int64_t i) { return i < 3 ? i : i - 3; }

Keeps in_document(const Keeps& inside) {
  return [inside](int64_t i, int64_t j) {
    return document_of(i) != 0 && document_of(i) == document_of(j) && inside(place_in(i), place_in(j));
  };
}

bool causal(int64_t i, int64_t j) { return j <= i; }

std::vector<NamedMask> named_masks() {
  return {
      {"full", [](int64_t, int64_t) { return true; }},
      {"causal", causal},
      {"causal_bottom_right", causal},
      {"window:2,1", [](int64_t i, int64_t j) { return i - 2 <= j && j <= i + 1; }},
      {"window:-1,0", causal},
      {"chunked:4", [](int64_t i, int64_t j) { return i / 4 == j / 4 && j <= i; }},
      {"prefix:5", [](int64_t i, int64_t j) { return j <= i || j < 5; }},
      {"documents:3,0,4", in_document(causal)},
      {"documents_causal:3,0,4", in_document(causal)},
      {"documents_full:3,0,4", in_document([](int64_t, int64_t) { return true; })},
      {"documents_window:1,0:3,0,4", in_document([](int64_t i, int64_t j) { return i - 1 <= j && j <= i; })},
      {"documents_chunked:2:3,0,4", in_document([](int64_t i, int64_t j) { return i / 2 == j / 2 && j <= i; })},
      {"document_ids:1,1,1,2,2,2,2,0,0", in_document(causal)},
      {"document_ids_full:1,1,1,2,2,2,2,0,0", in_document([](int64_t, int64_t) { return true; })},
      {"bands:0,3,0,9,-1,0/5,9,2,4,-9,9",
       [](int64_t i, int64_t j) { return (i < 3 && -1 <= j - i && j - i <= 0) || (5 <= i && 2 <= j && j < 4); }},
      {"causal&window:2,1", [](int64_t i, int64_t j) { return i - 2 <= j && j <= i; }},
  };
}

TEST(MaskKindsTest, EveryNameKeepsWhatItsDefinitionSays) {
  std::set<std::string> seen;
  for (const NamedMask& named : named_masks()) {
    SCOPED_TRACE(named.text);
    const MaskSpec mask = parse_mask(named.text, kLength, kLength);
    for (int64_t i = 0; i < kLength; ++i) {
      for (int64_t j = 0; j < kLength; ++j) EXPECT_EQ(mask.keeps(0, i, j), named.keeps(i, j)) << i << ", " << j;
    }
    const std::string text = named.text;
    seen.insert(text.substr(0, text.find(':')));
  }
  for (const MaskKind& kind : mask_kinds()) EXPECT_TRUE(seen.contains(std::string(kind.name))) << kind.name;
}

TEST(MaskKindsTest, ListsAreBatchEntries) {
  const MaskSpec prefix = parse_mask("prefix:1,6", kLength, kLength);
  EXPECT_FALSE(prefix.keeps(0, 0, 5));
  EXPECT_TRUE(prefix.keeps(1, 0, 5));
  const MaskSpec documents = parse_mask("documents:9/4,5", kLength, kLength);
  EXPECT_TRUE(documents.keeps(0, 8, 0));
  EXPECT_FALSE(documents.keeps(1, 8, 0));
}

TEST(MaskKindsTest, CornersCountWhereLengthsDiffer) {
  EXPECT_FALSE(parse_mask("causal_top_left", 4, kLength).keeps(0, 0, 5));
  EXPECT_TRUE(parse_mask("causal_bottom_right", 4, kLength).keeps(0, 0, 5));
}

std::string refusal(const std::string& text, int64_t q_len = kLength) {
  try {
    parse_mask(text, q_len, kLength);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(MaskKindsTest, WhatDoesNotFitIsRefusedWithHowItIsWritten) {
  const std::pair<const char*, const char*> wrong[] = {
      {"spiral", "use full, causal, window:L,R"},
      {"", "use full"},
      {"full:3", "has 1 arguments, not 0; write it as full"},
      {"window", "has 0 arguments, not enough; write it as window:L,R"},
      {"window:3", "gives 1 numbers, not 2; write it as window:L,R"},
      {"window:3,x", "\"x\" in \"window:3,x\" is not a whole number"},
      {"chunked:2:3", "has 2 arguments, not 1; write it as chunked:N"},
      {"prefix:2/3", "gives 2 lists, not 1"},
      {"documents_window:3,5", "not enough; write it as documents_window:L,R:LEN,..."},
      {"documents_top_left:3", "documents has no corner"},
      {"document_ids:1,2", "2 were given for a sequence of 9"},
      {"bands:1,2", "gives 2 numbers, not 6; write it as bands:Q0,Q1,K0,K1,LO,HI/..."},
      {"causal&spiral", "\"spiral\" is unknown"},
  };
  for (const auto& [text, part] : wrong) {
    EXPECT_NE(refusal(text).find(part), std::string::npos) << text << ": " << refusal(text);
  }
  EXPECT_NE(refusal("causal", 4).find("could start in two corners; write causal_top_left or"), std::string::npos);
  EXPECT_NE(refusal("documents:3", 4).find("4 positions and key/value 9"), std::string::npos);
}

// The words of a description have the inside mask's code, which is a place in the same table.
TEST(MaskKindsTest, TheFirstKindsAreThoseOfDocumentRules) {
  using Kind = DocumentRule::Kind;
  const std::pair<Kind, const char*> rules[] = {
      {Kind::kFull, "full"}, {Kind::kCausal, "causal"}, {Kind::kWindow, "window"}, {Kind::kChunked, "chunked"}};
  EXPECT_EQ(std::size(rules), kNumInsideKinds);
  for (const auto& [kind, name] : rules) {
    EXPECT_EQ(mask_kinds()[static_cast<size_t>(kind)].name, name);
    const DocumentRule rule{.kind = kind, .left = 3, .right = 4, .size = 5};
    const DocumentRule again = rule_of(static_cast<int64_t>(kind), numbers_of(rule));
    EXPECT_EQ(again.kind, kind);
    EXPECT_EQ(numbers_of(again), numbers_of(rule));
  }
}

}  // namespace
}  // namespace ringspan
