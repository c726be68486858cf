// Blocks of arrays that a running program copies to host memory as it makes them, and wakes who waits for them.
//
// A program names a stream by a number that is one of its inputs: its executable holds no address, and may be loaded by any process.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "error.h"
#include "gacc.h"

namespace {

using gacc::fail;

struct Arrival {
  int64_t place;  // device * num_slots + slot
  double seconds;
};

struct Stream {
  int64_t num_devices, num_slots;
  std::vector<void*> destinations;
  std::vector<int64_t> sizes;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<char> is_sent;
  std::deque<Arrival> arrived;
  int64_t num_copying = 0;
  bool is_closed = false;
};

std::mutex registry_mutex;
int64_t num_opened = 0;

std::unordered_map<int64_t, std::shared_ptr<Stream>>& registry() {
  static auto* streams = new std::unordered_map<int64_t, std::shared_ptr<Stream>>();  // never destroyed: a program may run while the process ends
  return *streams;
}

std::shared_ptr<Stream> find(int64_t id) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = registry().find(id);
  return found == registry().end() ? nullptr : found->second;
}

double now() {  // Python's time.perf_counter
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int32_t gacc_stream_open(void* const* destinations, const int64_t* sizes, int64_t num_devices, int64_t num_slots, int64_t* id) try {
  if (!destinations || !sizes || !id || num_devices < 1 || num_slots < 1) return fail("a stream needs a device, a slot and their arrays");
  const int64_t count = num_devices * num_slots;
  auto stream = std::make_shared<Stream>();
  stream->num_devices = num_devices, stream->num_slots = num_slots;
  stream->destinations.assign(destinations, destinations + count);
  stream->sizes.assign(sizes, sizes + count);
  stream->is_sent.assign(count, 0);
  std::lock_guard<std::mutex> lock(registry_mutex);
  *id = ++num_opened;  // never used again: what an abandoned program sends reaches no later stream
  registry()[*id] = std::move(stream);
  return 0;
} catch (const std::bad_alloc&) {
  return fail("out of memory");
}

int32_t gacc_stream_send(int64_t id, int64_t device, int64_t slot, const void* data, int64_t size_bytes) try {
  const std::shared_ptr<Stream> stream = find(id);
  if (!stream) return 0;  // closed: nobody waits for it
  if (device < 0 || device >= stream->num_devices || slot < 0 || slot >= stream->num_slots) {
    return fail("device %lld, slot %lld: the stream has %lld and %lld", static_cast<long long>(device), static_cast<long long>(slot),
                static_cast<long long>(stream->num_devices), static_cast<long long>(stream->num_slots));
  }
  const int64_t place = device * stream->num_slots + slot;
  if (!stream->destinations[place]) return 0;  // another device sends the same block
  if (size_bytes != stream->sizes[place]) {
    return fail("slot %lld: %lld bytes for a block of %lld", static_cast<long long>(slot), static_cast<long long>(size_bytes),
                static_cast<long long>(stream->sizes[place]));
  }
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    if (stream->is_closed) return 0;
    if (stream->is_sent[place]) return fail("device %lld sent slot %lld twice", static_cast<long long>(device), static_cast<long long>(slot));
    stream->is_sent[place] = 1;
    ++stream->num_copying;
  }
  std::memcpy(stream->destinations[place], data, size_bytes);
  {
    std::lock_guard<std::mutex> lock(stream->mutex);
    --stream->num_copying;
    stream->arrived.push_back({place, now()});
    stream->changed.notify_all();
  }
  return 0;
} catch (const std::bad_alloc&) {
  return fail("out of memory");
}

int32_t gacc_stream_wait(int64_t id, double seconds, int64_t capacity, int64_t* places, double* when, int64_t* count) {
  const std::shared_ptr<Stream> stream = find(id);
  if (!stream) return fail("stream %lld is not open", static_cast<long long>(id));
  if (!places || !when || !count || capacity < 1) return fail("a null array, or a capacity below 1");
  std::unique_lock<std::mutex> lock(stream->mutex);
  stream->changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return !stream->arrived.empty() || stream->is_closed; });
  for (*count = 0; *count < capacity && !stream->arrived.empty(); ++*count, stream->arrived.pop_front()) {
    places[*count] = stream->arrived.front().place;
    when[*count] = stream->arrived.front().seconds;
  }
  return 0;
}

int32_t gacc_stream_close(int64_t id) {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(registry_mutex);
    const auto found = registry().find(id);
    if (found == registry().end()) return 0;
    stream = found->second;
    registry().erase(found);
  }
  std::unique_lock<std::mutex> lock(stream->mutex);
  stream->is_closed = true;
  stream->changed.notify_all();
  stream->changed.wait(lock, [&] { return stream->num_copying == 0; });
  return 0;
}
