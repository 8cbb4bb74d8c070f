// What is written in Python: the multi-rank benchmark, the report on its results, fit, and pictures. All of it lives in
// the Python package; this tool only starts it, with the Python that it was installed beside.
#pragma once

#include <string>

namespace ringspan::cli {

// Draws a picture (ringspan/sim/picture.h) into `file`. Error where that fails; what went wrong is printed before.
void draw_picture(const std::string& picture, const std::string& file);

}  // namespace ringspan::cli
