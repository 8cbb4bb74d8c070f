// ringspan: the command line. Text for people, --json for machines; exit status 0, 1 (a result was not met) or
// 2 (bad arguments).
#include <exception>
#include <iostream>

#include <CLI/CLI.hpp>

#include "ringspan/base/error.h"

#include "cli/verbs.h"

namespace {

constexpr int kBadArguments = 2;

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Exact attention over a sequence that no single worker holds.", "ringspan");
  app.set_version_flag("--version", RINGSPAN_VERSION);
  app.require_subcommand(1);
  int status = 0;
  ringspan::cli::add_plan(app, status);
  ringspan::cli::add_ledger(app, status);
  ringspan::cli::add_simulate(app, status);
  ringspan::cli::add_fit(app, status);
  ringspan::cli::add_verify(app, status);
  ringspan::cli::add_bench(app, status);
  ringspan::cli::add_report(app, status);
  ringspan::cli::add_info(app, status);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& fault) {
    // Help and version come here too, with status 0.
    return app.exit(fault) == 0 ? 0 : kBadArguments;
  } catch (const ringspan::Error& fault) {
    std::cerr << "ringspan: " << fault.what() << "\n";
    return kBadArguments;
  } catch (const std::exception& fault) {
    std::cerr << "ringspan: " << fault.what() << "\n";
    return 1;
  }
  return status;
}
