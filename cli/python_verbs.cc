// Verbs that are written in Python: the multi-rank benchmark, the report on its results, and fit. They live in the
// Python package; this tool only starts them, with the Python that it was installed beside.
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <unistd.h>

#include "ringspan/base/error.h"

#include "cli/verbs.h"

namespace ringspan::cli {
namespace {

// The interpreter of the environment that holds this executable, else the first on the path.
std::string find_python() {
  std::error_code fault;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", fault);
  const std::filesystem::path beside = self.parent_path() / "python3";
  return !fault && std::filesystem::exists(beside, fault) ? beside.string() : "python3";
}

// Goes on as `python3 -m module arguments...`; comes back only where that cannot start.
void run_module(const std::string& module, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {find_python(), "-m", module};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  std::cout.flush();
  execvp(pointers[0], pointers.data());
  throw Error(concat("cannot start ", words[0], " (", std::strerror(errno), "); ", module,
                     " needs Python with the ringspan package: pip install ringspan"));
}

void add_module(CLI::App& app, const char* name, const char* module, const char* description) {
  CLI::App* verb = app.add_subcommand(name, description);
  // Everything behind the verb is the module's, --help too.
  verb->set_help_flag();
  verb->prefix_command();
  verb->callback([verb, module] { run_module(module, verb->remaining()); });
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
