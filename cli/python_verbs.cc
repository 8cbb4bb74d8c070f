#include "cli/python_verbs.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>

#include <sys/wait.h>
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

// Becomes Python with these arguments; `purpose` needs it.
[[noreturn]] void become_python(std::vector<std::string> words, const std::string& purpose) {
  words.insert(words.begin(), find_python());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  std::cout.flush();
  execvp(pointers[0], pointers.data());
  throw Error(concat("cannot start ", words[0], " (", std::strerror(errno), "); ", purpose,
                     " needs Python with the ringspan package: pip install ringspan"));
}

// The exit status of Python with these arguments, and `input` as its standard input.
int run_python(const std::string& input, const std::vector<std::string>& words, const std::string& purpose) {
  // Not a pipe: Python may end before it has read all. The file has no name and goes when both have closed it.
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), &std::fclose);
  RINGSPAN_CHECK(file && std::fputs(input.c_str(), file.get()) >= 0 && std::fseek(file.get(), 0, SEEK_SET) == 0,
                 "cannot write a temporary file (", std::strerror(errno), ")");
  std::cout.flush();
  const pid_t child = fork();
  RINGSPAN_CHECK(child >= 0, "cannot start a process for ", purpose, " (", std::strerror(errno), ")");
  if (child == 0) {
    dup2(fileno(file.get()), STDIN_FILENO);
    try {
      become_python(words, purpose);
    } catch (const Error& fault) {
      std::cerr << "ringspan: " << fault.what() << std::endl;
    }
    _exit(127);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Runs ringspan/picture.py as a file. As a module it would bring the package along, and with it torch: seconds.
constexpr const char* kDrawPicture = R"(
import importlib.util, pathlib, runpy, sys
package = importlib.util.find_spec("ringspan")
if package is None or package.origin is None:
    sys.exit("pictures need the Python package ringspan, which " + sys.executable + " does not have")
runpy.run_path(str(pathlib.Path(package.origin).with_name("picture.py")), run_name="__main__")
)";

// Goes on as `python3 -m module arguments...`.
[[noreturn]] void become_module(const std::string& module, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"-m", module};
  words.insert(words.end(), arguments.begin(), arguments.end());
  become_python(std::move(words), module);
}

void add_module(CLI::App& app, const char* name, const char* module, const char* description) {
  CLI::App* verb = app.add_subcommand(name, description);
  // Everything behind the verb is the module's, --help too.
  verb->set_help_flag();
  verb->prefix_command();
  verb->callback([verb, module] { become_module(module, verb->remaining()); });
}

}  // namespace

void draw_picture(const std::string& picture, const std::string& file) {
  const int status = run_python(picture, {"-c", kDrawPicture, "/dev/stdin", file}, "--plot");
  RINGSPAN_CHECK(status == 0, "--plot ", file, ": drawing it ended with status ", status, "; see above");
}

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
