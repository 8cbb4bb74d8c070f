// One function per verb. Each adds its subcommand; when that is chosen it runs while the command line is parsed and
// leaves the exit status: 0 done, 1 a result was not met. Bad arguments throw Error (status 2).
#pragma once

#include <CLI/CLI.hpp>

namespace ringspan::cli {

void add_plan(CLI::App& app, int& status);
void add_ledger(CLI::App& app, int& status);
void add_simulate(CLI::App& app, int& status);
void add_fit(CLI::App& app, int& status);
void add_verify(CLI::App& app, int& status);
void add_bench(CLI::App& app, int& status);
void add_report(CLI::App& app, int& status);
void add_info(CLI::App& app, int& status);

}  // namespace ringspan::cli
