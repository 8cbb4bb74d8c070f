// One attention call for tests: inputs, mask, the oracle's answer, and the judgement of a kernel's answer.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "ringspan/base/parallel.h"
#include "ringspan/kernel/attention.h"

#include "tests/ringspan/support/masks.h"
#include "tests/ringspan/support/oracle.h"
#include "tests/ringspan/support/tensor.h"

namespace ringspan::test {

struct CaseSpec {
  DType dtype = DType::kF32;
  int64_t batch = 1, q_heads = 1, kv_heads = 1;
  int64_t q_len = 1, kv_len = 1, qk_dim = 16, v_dim = 16;
  MaskKind mask = MaskKind::kFull;
  std::optional<double> scale{};  // nothing = 1 / sqrt(qk_dim)
  double amplitude = 1;           // of q and k
  uint64_t seed = 1;

  std::string name() const;  // fit for a test's name
};
std::ostream& operator<<(std::ostream& stream, const CaseSpec& spec);

// Rows that no tile covers hold NaN: reading one is seen.
struct AttentionCase {
  explicit AttentionCase(const CaseSpec& spec, const PairTerms& terms = {});

  CaseSpec spec;
  Inputs inputs;
  Array dout, dlse;
  std::vector<Tile> tiles;
  Outputs want;
  Gradients want_grads;
  HonestErrors honest;
};
// The last case is kept, since tests for several instruction sets ask for the same one after the other.
std::shared_ptr<const AttentionCase> make_case(const CaseSpec& spec);

// Kernels under test: the library's own on one instruction set, or the reference.
struct Kernels {
  std::function<void(const ForwardArgs&, Workspace&, const Parallel&)> forward;
  std::function<void(const BackwardArgs&, Workspace&, const Parallel&)> backward;
};
// Forces `isa` for each call, and fails the test unless it is the one that ran.
Kernels kernels_of(Isa isa);
Kernels reference_kernels();

// What the kernel tests run on: every instruction set that this machine offers, and what other files add while static
// objects are initialised (the list of tests is made right after).
struct Target {
  std::string name;
  Kernels kernels;
  bool is_slow = false;  // emulated: tests leave out repetitions
};
std::ostream& operator<<(std::ostream& stream, const Target& target);
std::vector<Target> native_targets();
std::vector<Target>& added_targets();
std::vector<Target> all_targets();  // both

struct RunOptions {
  std::array<int, 4> order{0, 1, 2, 3};  // memory order of every tensor, outputs too
  int64_t gap = 1;                       // stride of the innermost dimension
  int64_t num_calls = 1;                 // the keys are cut into so many calls
  const Parallel* parallel = nullptr;    // nullptr = Serial
  std::vector<double> sink{};            // one per query head; empty = none
  PairInputs pairs{};                    // what AttentionCase was told as PairTerms
  TensorView dbias{};                    // backward
  bool is_announced = false;             // backward: somebody waits to be told before gradients are written
  Workspace* workspace = nullptr;        // nullptr = a fresh one
};

struct ForwardResult {
  Array out, max, sum, lse;
};
ForwardResult run_forward(const AttentionCase& c, const Kernels& kernels, const RunOptions& options = {});

// With lse and delta of the oracle, so that the backward kernel is judged alone.
struct BackwardResult {
  Array dq, dk, dv;
};
BackwardResult run_backward(const AttentionCase& c, const Kernels& kernels, const RunOptions& options = {});

// EXPECTs the answers within the tolerances of their dtype (attention_case.cc says which, and why).
void expect_accurate(const AttentionCase& c, const ForwardResult& result);
void expect_accurate(const AttentionCase& c, const BackwardResult& result);
// EXPECTs the same bits.
void expect_same(const ForwardResult& a, const ForwardResult& b);
void expect_same(const BackwardResult& a, const BackwardResult& b);

}  // namespace ringspan::test
