#include "binding/watch/connections.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

namespace ringspan::binding {
namespace {

struct Connection {
  std::mutex mutex;
  c10::intrusive_ptr<c10d::Store> store;
};
// Process, host and port: a forked child makes its own.
using Server = std::tuple<int64_t, std::string, int64_t>;
struct Table {
  std::mutex mutex;
  std::map<Server, std::shared_ptr<Connection>> connections;
};

// Never destroyed: threads may use it while static objects go.
Table& table() {
  static auto& table = *new Table;
  return table;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> without_prefix(c10::intrusive_ptr<c10d::Store> store) {
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get())) store = prefixed->getUnderlyingStore();
  return store;
}

bool sets_without_answer(const c10::intrusive_ptr<c10d::Store>& store) {
  return dynamic_cast<c10d::TCPStore*>(without_prefix(store).get()) != nullptr;
}

std::string set_first(c10d::Store& store, const std::string& key, const std::string& text) {
  const std::vector<uint8_t> bytes(text.begin(), text.end());
  const std::vector<uint8_t> standing = store.compareSet(key, std::vector<uint8_t>{}, bytes);
  // The server of TCPStore without libuv wakes those that wait for a key when it is set, and not here.
  if (standing == bytes) store.set(key, bytes);
  return {standing.begin(), standing.end()};
}

c10::intrusive_ptr<c10d::Store> common_connection(const c10::intrusive_ptr<c10d::Store>& store) {
  const c10::intrusive_ptr<c10d::Store> base = without_prefix(store);
  const auto* server = dynamic_cast<c10d::TCPStore*>(base.get());
  if (!server) return base->clone();
  std::shared_ptr<Connection> connection;
  {
    const std::lock_guard lock(table().mutex);
    auto& known = table().connections[{::getpid(), server->getHost(), server->getPort()}];
    if (!known) known = std::make_shared<Connection>();
    connection = known;
  }
  const std::lock_guard lock(connection->mutex);
  if (!connection->store) connection->store = base->clone();
  return connection->store;
}

void forget_connection(const c10::intrusive_ptr<c10d::Store>& connection) {
  const std::lock_guard lock(table().mutex);
  std::erase_if(table().connections, [&](const auto& item) { return item.second->store == connection; });
}

}  // namespace ringspan::binding
