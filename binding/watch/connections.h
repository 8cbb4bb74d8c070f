// Connections to the store of a group. Each new one costs PyTorch two look-ups of a host name, which may take seconds.
#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ringspan::binding {

// The store without the prefixes that groups put before their keys, over the same connection.
c10::intrusive_ptr<c10d::Store> without_prefix(c10::intrusive_ptr<c10d::Store> store);

// Whether set() only sends, so that it cannot be stuck.
bool sets_without_answer(const c10::intrusive_ptr<c10d::Store>& store);

// Puts `text` under a key where nothing stands yet. Returns what stands there then.
std::string set_first(c10d::Store& store, const std::string& key, const std::string& text);

// Without prefix, for short questions that end at once: the same connection for all groups of this process that have
// one TCPStore, and a new one else. May take as long as anything that is asked of a store.
c10::intrusive_ptr<c10d::Store> common_connection(const c10::intrusive_ptr<c10d::Store>& store);
// It has failed: the next who asks gets another one.
void forget_connection(const c10::intrusive_ptr<c10d::Store>& connection);

}  // namespace ringspan::binding
