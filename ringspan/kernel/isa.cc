#include "ringspan/kernel/isa.h"

#include <atomic>
#include <cstdlib>

#include "ringspan/base/error.h"

#ifdef RINGSPAN_ISA_AVX512
#include <cpuid.h>
#endif

namespace ringspan {
namespace {

constexpr Isa kAllIsas[] = {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16};
constexpr int kNotForced = -1;
std::atomic<int> forced_isa{kNotForced};

#ifdef RINGSPAN_ISA_AVX512
bool offers_avx512_bf16() {
  // GCC 12 knows no name for this feature in __builtin_cpu_supports: leaf 7, subleaf 1, EAX bit 5.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
}
#endif

// __builtin_cpu_supports also asks whether the system saves the wide registers.
bool offers(Isa isa) {
  switch (isa) {
    case Isa::kGeneric: return true;
#ifdef RINGSPAN_ISA_X86
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
#ifdef RINGSPAN_ISA_AVX512
    case Isa::kAvx512:
      return offers(Isa::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::kAvx512Bf16: return offers(Isa::kAvx512) && offers_avx512_bf16();
#endif
    default: return false;
  }
}

std::string join_names(const std::vector<Isa>& isas) {
  std::string names;
  for (Isa isa : isas) names += concat(names.empty() ? "" : ", ", name_of(isa));
  return names;
}

void check_offered(Isa isa, const char* who) {
  RINGSPAN_CHECK(offers(isa), who, " asks for ", name_of(isa), ", but this machine and build offer ",
                 join_names(available_isas()));
}

Isa choose_isa() {
  const char* name = std::getenv("RINGSPAN_ISA");
  if (name == nullptr || *name == '\0') return available_isas().back();
  const Isa isa = parse_isa(name);
  check_offered(isa, "RINGSPAN_ISA");
  return isa;
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kGeneric: return "generic";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx512Bf16: return "avx512_bf16";
  }
  return "unknown";
}

Isa parse_isa(std::string_view name) {
  for (Isa isa : kAllIsas) {
    if (name == name_of(isa)) return isa;
  }
  throw Error(concat("unknown instruction set '", name, "'; known are generic, avx2, avx512, avx512_bf16"));
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : kAllIsas) {
    if (offers(isa)) isas.push_back(isa);
  }
  return isas;
}

Isa current_isa() {
  const int forced = forced_isa.load(std::memory_order_relaxed);
  if (forced != kNotForced) return static_cast<Isa>(forced);
  // A bad RINGSPAN_ISA throws out of the initialiser, so every call reports it until it is set right.
  static const Isa chosen = choose_isa();
  return chosen;
}

void force_isa(std::optional<Isa> isa) {
  if (isa) check_offered(*isa, "force_isa");
  forced_isa.store(isa ? static_cast<int>(*isa) : kNotForced, std::memory_order_relaxed);
}

}  // namespace ringspan
