// Verbs that are written in Python: the multi-rank benchmark, the report on its results, and fit. They live in the
// Python package; this tool only starts them.
#include "cli/python_module.h"
#include "cli/verbs.h"

namespace ringspan::cli {
namespace {

void add_module(CLI::App& app, const char* name, const char* module, const char* description) {
  CLI::App* verb = app.add_subcommand(name, description);
  // Everything behind the verb is the module's, --help too.
  verb->set_help_flag();
  verb->prefix_command();
  verb->callback([verb, module] { become_module(module, verb->remaining()); });
}

}  // namespace

void add_bench(CLI::App& app, int&) {
  add_module(app, "bench", "ringspan.bench", "Measure attention over ranks (start it with torchrun for several)");
}

void add_fit(CLI::App& app, int&) {
  add_module(app, "fit", "ringspan.fit", "Measure this machine for simulate, and write its description");
}

void add_report(CLI::App& app, int&) {
  add_module(app, "report", "ringspan.report", "A page from a folder of benchmark results");
}

}  // namespace ringspan::cli
