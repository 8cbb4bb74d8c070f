#include "cli/summary.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>

namespace ringspan::cli {
namespace {

constexpr int kNameWidth = 24, kColumnWidth = 20;

}  // namespace

int64_t Measure::busiest() const { return std::ranges::max_element(values_) - values_.begin(); }

std::string Measure::header() {
  std::ostringstream line;
  line << std::setw(kNameWidth) << "" << std::setw(kColumnWidth) << "all ranks" << std::setw(kColumnWidth) << "least"
       << std::setw(kColumnWidth) << "mean" << std::setw(kColumnWidth) << "most";
  return line.str();
}

double Measure::total() const {
  double total = 0;
  for (const int64_t value : values_) total += static_cast<double>(value);
  return total;
}

std::string Measure::line() const {
  std::ostringstream line;
  line << std::left << std::setw(kNameWidth) << name_ << std::right << std::fixed << std::setprecision(0)
       << std::setw(kColumnWidth) << total() << std::setw(kColumnWidth) << least() << std::setw(kColumnWidth) << mean()
       << std::setw(kColumnWidth) << most();
  return line.str();
}

std::vector<Pick> picks_of(int64_t world, const std::vector<Measure>& measures) {
  std::map<int64_t, std::string> reasons;
  const auto add = [&](int64_t rank, const std::string& why) {
    std::string& reason = reasons[rank];
    reason += (reason.empty() ? "" : ", ") + why;
  };
  add(0, "first");
  add(world - 1, "last");
  for (const Measure& measure : measures) {
    if (!measure.is_equal()) add(measure.busiest(), "most " + measure.name());
  }
  std::vector<Pick> picks;
  for (const auto& [rank, why] : reasons) picks.push_back({rank, why});
  return picks;
}

std::string summary_of(int64_t world, const std::vector<Measure>& measures) {
  std::ostringstream text;
  text << Measure::header() << "\n";
  for (const Measure& measure : measures) text << measure.line() << "\n";
  text << "\n"
       << world << " ranks, of which a few are shown; --rank N tells one step by step, --all-ranks every one, --json "
       << "all for machines\n";
  return text.str();
}

}  // namespace ringspan::cli
