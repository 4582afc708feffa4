// A simulated accelerator on torch's PrivateUse1 interface, for tests on machines without one.
//
// It behaves as CUDA does where a program can tell: streams run behind the host, freed memory is reused in the order of
// its stream, and the host cannot read device memory. It computes on the CPU.
//   device.cpp   streams, events, memory, random state: what torch asks of any accelerator
//   kernels.cpp  operations: each runs its CPU kernel on the stream, later than the call
//   autocast.cpp torch's own lists of operations for autocast
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <functional>
#include <memory>
#include <string>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kStreams = 9; // of each device: the default stream, and a pool of eight

// --- what tests switch (device.py describes each) --------------------------------------------------------------------

enum Pace { kFree, kEager, kLate };

struct Settings {
  std::atomic<int64_t> default_pace{kFree};
  std::atomic<int64_t> other_pace{kFree};
  std::atomic<int64_t> event_times{1};
  std::atomic<int64_t> capturing{0};
  std::atomic<int64_t> dropout_rounds_alike{1};
};
Settings& settings();

struct Counters {
  std::atomic<int64_t> bytes_to_host{0};
  std::atomic<int64_t> bytes_from_host{0};
};
Counters& counters(int device);

// --- streams ---------------------------------------------------------------------------------------------------------

using Task = std::function<void()>;

// A point in the queue of a stream: behind all that was queued when it was recorded.
struct Mark {
  c10::Stream stream;
  uint64_t number;
  double milliseconds = 0;
};

c10::Stream current_stream(int device);
uint64_t enqueue(const c10::Stream& stream, Task task); // returns the task's number
std::shared_ptr<Mark> record(const c10::Stream& stream);
void wait_on_stream(const c10::Stream& stream, const std::shared_ptr<Mark>& mark);
void synchronize(const c10::Stream& stream); // raises what a kernel of the device raised since the last call

// --- memory ----------------------------------------------------------------------------------------------------------

c10::Allocator* device_allocator(); // the one that is registered now
void* readable(const void* device_pointer); // where kernels find what lies at an address of device memory
void record_use(const c10::DataPtr& data, const c10::Stream& stream);
std::shared_ptr<void> pinned_memory(const void* host_pointer); // empty if the memory is not pinned
void resize_storage(const c10::Storage& storage, size_t bytes);

// --- random numbers --------------------------------------------------------------------------------------------------

// A CPU generator for one kernel. It depends on the device generator's seed and on how often that was drawn from.
at::Generator draw(const std::optional<at::Generator>& generator, int device);

} // namespace sim
