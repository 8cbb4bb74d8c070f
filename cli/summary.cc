#include "cli/summary.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>

namespace ringspan::cli {

int64_t Measure::busiest() const { return std::ranges::max_element(values_) - values_.begin(); }

double Measure::total() const {
  double total = 0;
  for (const int64_t value : values_) total += static_cast<double>(value);
  return total;
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
  const auto add_line = [&](const std::string& name, const auto&... columns) {
    text << std::left << std::setw(24) << name << std::right;
    ((text << std::setw(20) << columns), ...);
    text << "\n";
  };
  text << std::fixed << std::setprecision(0);
  add_line("", "all ranks", "least", "mean", "most");
  for (const Measure& one : measures) add_line(one.name(), one.total(), one.least(), one.mean(), one.most());
  text << "\n"
       << world << " ranks, of which a few are shown; --rank N tells one step by step, --all-ranks every one, --json "
       << "all for machines\n";
  return text.str();
}

}  // namespace ringspan::cli
