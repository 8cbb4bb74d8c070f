// Parts that are written in Python are run with the Python that this tool was installed beside.
#pragma once

#include <string>
#include <vector>

namespace ringspan::cli {

// Goes on as `python3 -m module arguments...`; comes back only where that cannot start, with an Error.
[[noreturn]] void become_module(const std::string& module, const std::vector<std::string>& arguments);

// Draws a picture (ringspan/sim/picture.h) into `file`. Error where that fails; what went wrong is printed before.
void draw_picture(const std::string& picture, const std::string& file);

}  // namespace ringspan::cli
