#include "cli/python_module.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>

#include <sys/wait.h>
#include <unistd.h>

#include "ringspan/base/error.h"

namespace ringspan::cli {
namespace {

// The interpreter of the environment that holds this executable, else the first on the path.
std::string find_python() {
  std::error_code fault;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", fault);
  const std::filesystem::path beside = self.parent_path() / "python3";
  return !fault && std::filesystem::exists(beside, fault) ? beside.string() : "python3";
}

// A file that is there for as long as this object.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text) {
    path_ = (std::filesystem::temp_directory_path() / "ringspan-XXXXXX").string();
    const int descriptor = mkstemp(path_.data());
    RINGSPAN_CHECK(descriptor >= 0, "cannot make a temporary file like ", path_, " (", std::strerror(errno), ")");
    close(descriptor);
    std::ofstream file(path_);
    file << text;
    file.close();
    RINGSPAN_CHECK(file, "cannot write ", path_);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() { std::remove(path_.c_str()); }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

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

// The exit status of Python with these arguments.
int run_python(const std::vector<std::string>& words, const std::string& purpose) {
  std::cout.flush();
  const pid_t child = fork();
  RINGSPAN_CHECK(child >= 0, "cannot start a process for ", purpose, " (", std::strerror(errno), ")");
  if (child == 0) {
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

}  // namespace

void become_module(const std::string& module, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"-m", module};
  words.insert(words.end(), arguments.begin(), arguments.end());
  become_python(std::move(words), module);
}

void draw_picture(const std::string& picture, const std::string& file) {
  const TemporaryFile json(picture);
  const int status = run_python({"-c", kDrawPicture, json.path(), file}, "--plot");
  RINGSPAN_CHECK(status == 0, "--plot ", file, ": drawing it ended with status ", status, "; see above");
}

}  // namespace ringspan::cli
