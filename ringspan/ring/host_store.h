// HostStore: slots in plain memory, messages over a Transport, each transfer one of its own. An empty one is not sent:
// both sides know its size.
#pragma once

#include <array>
#include <map>
#include <utility>
#include <vector>

#include "ringspan/ring/buffer.h"
#include "ringspan/ring/store.h"
#include "ringspan/transport/transport.h"

namespace ringspan {

class HostStore final : public Store {
 public:
  // `part` and `transport` live as long as this.
  HostStore(const RankPlan& part, Transport& transport) : part_(part), transport_(transport) {}
  ~HostStore() override;
  HostStore(const HostStore&) = delete;
  HostStore& operator=(const HostStore&) = delete;

  void bind(Payload payload, const TensorView& tensor) override;
  TensorView view(Payload payload, const Operand& operand) override;
  void post(std::span<const Transfer> transfers) override;
  void wait(int64_t step, bool gradients) override;
  bool awaits(int64_t step, bool gradients) const override;

 private:
  // A posted transfer. `message` where the rows do not lie in one piece or are to be added.
  struct Flight {
    const Transfer* transfer = nullptr;
    Transport::Request request = 0;
    Buffer message{};

    bool is_due(int64_t step, bool gradients) const;
  };

  int64_t most_rows(Payload payload, int64_t slot) const;
  DType dtype_of(Payload payload) const;
  TensorView buffer_view(Payload payload, int64_t slot, int64_t rows, int64_t head_begin, int64_t head_end);
  // The tensor that holds the transfer's rows at one end, of its batch entries and heads.
  TensorView tensor_at(const Transfer& transfer, const Place& place);
  void start(const Transfer& transfer);
  void complete(const Flight& flight);
  void copy_here(const Transfer& transfer);

  const RankPlan& part_;
  Transport& transport_;
  std::map<Payload, TensorView> own_;
  std::map<std::pair<Payload, int64_t>, Buffer> buffers_;
  std::vector<Flight> flights_;  // in the order of posting
};

}  // namespace ringspan
