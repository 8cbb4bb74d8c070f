// Which instruction set the kernels use. One body of kernel text is compiled once per set; the choice is made at run
// time, from CPUID, at the outermost call.
//
// The environment variable RINGSPAN_ISA = generic | avx2 | avx512 | avx512_bf16 forces one from outside; a name that
// this machine or build lacks is an Error at the first call.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace ringspan {

enum class Isa : uint8_t { kGeneric, kAvx2, kAvx512, kAvx512Bf16 };

const char* name_of(Isa isa);
Isa parse_isa(std::string_view name);

// Compiled in and offered by this CPU, slowest first.
std::vector<Isa> available_isas();
// The forced one, else the last of available_isas().
Isa current_isa();
// Forces one for this process (tests); nothing = back to the environment's or the best.
void force_isa(std::optional<Isa> isa);

}  // namespace ringspan
