#include <iostream>
#include <memory>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "ringspan/kernel/isa.h"

#include "cli/verbs.h"

namespace ringspan::cli {
namespace {

void print_info(bool as_json) {
  std::vector<const char*> names;
  for (Isa isa : available_isas()) names.push_back(name_of(isa));
  const char* current = name_of(current_isa());
  const unsigned threads = std::thread::hardware_concurrency();
  if (as_json) {
    const nlohmann::ordered_json json{
        {"version", RINGSPAN_VERSION}, {"isas", names}, {"isa", current}, {"hardware_threads", threads}};
    std::cout << json.dump() << "\n";
    return;
  }
  std::cout << "version           " << RINGSPAN_VERSION << "\ninstruction sets ";
  for (const char* name : names) std::cout << " " << name;
  std::cout << "\nin use            " << current << "  (RINGSPAN_ISA chooses another)\nhardware threads  " << threads
            << "\n";
}

}  // namespace

void add_info(CLI::App& app, int&) {
  CLI::App* verb = app.add_subcommand("info", "Version, instruction sets and threads of this build and machine");
  const auto as_json = std::make_shared<bool>(false);
  verb->add_flag("--json", *as_json, "Print JSON");
  verb->callback([as_json] { print_info(*as_json); });
}

}  // namespace ringspan::cli
