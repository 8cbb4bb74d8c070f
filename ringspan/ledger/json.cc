#include <nlohmann/json.hpp>

#include "ringspan/ledger/ledger.h"

namespace ringspan {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const StepLedger& step) {
  Json sent = Json::object();
  for (const SentTensor& tensor : step.sent) sent[name_of(tensor.payload)] = tensor.bytes;
  return {{"step", step.step},
          {"sent", std::move(sent)},
          {"messages", step.messages},
          {"kept_pairs", step.kept_pairs},
          {"flops", step.flops}};
}

Json json_of(const PassLedger& pass) {
  Json steps = Json::array();
  for (const StepLedger& step : pass.steps) steps.push_back(json_of(step));
  return {{"sent_bytes", pass.sent_bytes()}, {"messages", pass.messages()},   {"kept_pairs", pass.kept_pairs()},
          {"flops", pass.flops()},           {"peak_bytes", pass.peak_bytes}, {"steps", std::move(steps)}};
}

}  // namespace

std::string to_json(const RankLedger& ledger) {
  return Json{{"rank", ledger.rank}, {"forward", json_of(ledger.forward)}, {"backward", json_of(ledger.backward)}}
      .dump();
}

}  // namespace ringspan
