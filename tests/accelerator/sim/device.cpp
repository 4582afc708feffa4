#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace sim {

// Everything global is allocated once and never freed: worker threads and tensors may outlive static destructors.
Settings& settings() {
  static auto* all = new Settings();
  return *all;
}

Counters& counters(int device) {
  static auto* all = new Counters[kDevices];
  return all[device];
}

// --- streams ---------------------------------------------------------------------------------------------------------
//
// A stream is a queue and a thread that works it off. How far behind the host it runs is a setting, for the default
// streams and for all others:
//   free   as fast as its thread gets to it
//   eager  the host waits until the stream has done all that it can do
//   late   nothing runs before the host, or another stream that runs, waits for it
// If one is eager and the other late, then the order in which tasks of different streams run depends on nothing but the
// waits of the program. So a missing wait gives the same wrong result each time.

namespace {

struct Queue {
  bool is_default = false;
  std::deque<Task> tasks;
  uint64_t queued = 0; // number of tasks so far
  uint64_t finished = 0;
  uint64_t demanded = 0; // number of the last task that somebody waits for
  bool has_thread = false;

  int64_t pace() const {
    return is_default ? settings().default_pace : settings().other_pace;
  }
};

struct Streams {
  std::mutex mutex;
  std::condition_variable changed;
  Queue queues[kDevices][kStreams];
  std::string errors[kDevices]; // the first error of a kernel that nobody has seen
};

Streams& streams() {
  static auto* all = new Streams();
  return *all;
}

Queue& queue_of(const c10::Stream& stream) {
  return streams().queues[stream.device_index()][stream.id()];
}

void work(Queue& queue, int device) {
  auto& all = streams();
  std::unique_lock<std::mutex> lock(all.mutex);
  while (true) {
    all.changed.wait(lock, [&] {
      return !queue.tasks.empty() && (queue.pace() != kLate || queue.finished < queue.demanded);
    });
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    lock.unlock();
    std::string error;
    try {
      task();
    } catch (const c10::Error& raised) {
      error = raised.what_without_backtrace();
    } catch (const std::exception& raised) {
      error = raised.what();
    }
    task = nullptr; // frees what the task holds while nothing is locked
    lock.lock();
    if (!error.empty() && all.errors[device].empty()) {
      all.errors[device] = error;
    }
    ++queue.finished;
    all.changed.notify_all();
  }
}

void wait_until(Queue& queue, uint64_t number) {
  auto& all = streams();
  std::unique_lock<std::mutex> lock(all.mutex);
  queue.demanded = std::max(queue.demanded, number);
  all.changed.notify_all();
  all.changed.wait(lock, [&] { return queue.finished >= number; });
}

bool is_reached(const Mark& mark) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  return queue_of(mark.stream).finished >= mark.number;
}

void wait_until_empty(Queue& queue) {
  std::unique_lock<std::mutex> lock(streams().mutex);
  uint64_t number = queue.queued;
  lock.unlock();
  wait_until(queue, number);
}

void raise_error_of(int device) {
  std::unique_lock<std::mutex> lock(streams().mutex);
  std::string error;
  std::swap(error, streams().errors[device]);
  lock.unlock();
  TORCH_CHECK(error.empty(), "sim: a kernel that was started earlier has failed: ", error);
}

void synchronize_device(int device) {
  for (auto& queue : streams().queues[device]) {
    wait_until_empty(queue);
  }
  raise_error_of(device);
}

thread_local int current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {};

} // namespace

c10::Stream current_stream(int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), current_streams[device]);
}

uint64_t enqueue(const c10::Stream& stream, Task task) {
  auto& all = streams();
  auto& queue = queue_of(stream);
  std::unique_lock<std::mutex> lock(all.mutex);
  if (!queue.has_thread) {
    queue.has_thread = true;
    queue.is_default = stream.id() == 0;
    std::thread(work, std::ref(queue), stream.device_index()).detach();
  }
  queue.tasks.push_back(std::move(task));
  uint64_t number = ++queue.queued;
  all.changed.notify_all();
  if (queue.pace() == kEager) {
    all.changed.wait(lock, [&] { return queue.finished >= number; });
  }
  return number;
}

std::shared_ptr<Mark> record(const c10::Stream& stream) {
  auto mark = std::make_shared<Mark>(Mark{stream, 0});
  mark->number = enqueue(stream, [mark] {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    mark->milliseconds = std::chrono::duration<double, std::milli>(now).count();
  });
  return mark;
}

void wait_on_stream(const c10::Stream& stream, const std::shared_ptr<Mark>& mark) {
  if (stream != mark->stream) {
    enqueue(stream, [mark] { wait_until(queue_of(mark->stream), mark->number); });
  }
}

void synchronize(const c10::Stream& stream) {
  wait_until_empty(queue_of(stream));
  raise_error_of(stream.device_index());
}

// --- memory ----------------------------------------------------------------------------------------------------------
//
// Each device has a range of addresses that nobody may read or write, and a second one of the same size for its bytes.
// Tensors point into the first, kernels use the second, so a host that follows `data_ptr` is stopped by the system.
//
// The allocator keeps freed blocks for the next tensor of the same size on the same stream, as CUDA's does. A freed
// block is filled with 0xFF, which is NaN in every floating-point type, in the order of its stream: whoever still reads
// it there without a wait reads NaN.

namespace {

constexpr size_t kRangeBytes = size_t(1) << 36;
constexpr size_t kRoundBytes = 512;
constexpr size_t kPageBytes = 4096;
constexpr size_t kDefaultBytes = size_t(1) << 32; // memory of a device

struct Block {
  char* address;
  size_t size;
  size_t requested;
  int device;
  c10::StreamId stream;
  std::set<c10::StreamId> users; // other streams that use it, as recorded
  std::vector<std::shared_ptr<Mark>> pending; // when they no longer do
};

using Stats = c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingAllocator::StatArray;

struct Heap {
  std::mutex mutex;
  char* hidden = nullptr;
  size_t capacity = kDefaultBytes;
  std::map<size_t, size_t> holes; // offset -> bytes
  std::map<std::pair<c10::StreamId, size_t>, std::vector<Block*>> cached;
  std::vector<Block*> pending; // freed, but other streams still use them
  Stats stats;
  int64_t most_active = 0; // as the peak of `stats`, but only tests reset it
  bool has_words = false;
  std::string words; // of the error if memory runs out, if it is a plain one
};

Heap& heap(int device) {
  static auto* all = [] {
    auto* heaps = new Heap[kDevices];
    for (int i = 0; i < kDevices; ++i) {
      int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      auto* range = static_cast<char*>(mmap(nullptr, 2 * kRangeBytes, PROT_NONE, flags, -1, 0));
      TORCH_CHECK(range != MAP_FAILED, "sim: no address space");
      TORCH_CHECK(mprotect(range + kRangeBytes, kRangeBytes, PROT_READ | PROT_WRITE) == 0, "sim: mprotect failed");
      heaps[i].hidden = range;
      heaps[i].holes[0] = kRangeBytes;
    }
    return heaps;
  }();
  return all[device];
}

void add(StatArray& stat, size_t amount) {
  stat[0].increase(amount);
}

void subtract(StatArray& stat, size_t amount) {
  stat[0].decrease(amount);
}

c10::Stream stream_of(const Block& block, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, block.device), id);
}

void poison(const Block& block) {
  void* bytes = readable(block.address);
  size_t size = block.size;
  enqueue(stream_of(block, block.stream), [bytes, size] { std::memset(bytes, 0xFF, size); });
}

// All functions on heaps below expect the heap to be locked.

void retire(Heap& heap, Block* block) {
  subtract(heap.stats.active, 1);
  subtract(heap.stats.active_bytes, block->size);
  subtract(heap.stats.requested_bytes, block->requested);
  poison(*block);
  heap.cached[{block->stream, block->size}].push_back(block);
}

void retire_reached(Heap& heap) {
  auto waiting = std::move(heap.pending);
  heap.pending.clear();
  for (auto* block : waiting) {
    bool is_free = true;
    for (const auto& mark : block->pending) {
      is_free = is_free && is_reached(*mark);
    }
    if (is_free) {
      block->pending.clear();
      retire(heap, block);
    } else {
      heap.pending.push_back(block);
    }
  }
}

void give_back(Heap& heap, Block* block) {
  // Whole pages only: the first and the last one may hold bytes of neighbours, which madvise would clear as well.
  auto first = (reinterpret_cast<uintptr_t>(readable(block->address)) + kPageBytes - 1) / kPageBytes * kPageBytes;
  auto last = (reinterpret_cast<uintptr_t>(readable(block->address)) + block->size) / kPageBytes * kPageBytes;
  if (first < last) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }
  subtract(heap.stats.segment, 1);
  subtract(heap.stats.reserved_bytes, block->size);
  heap.stats.num_device_free += 1;
  size_t start = block->address - heap.hidden;
  size_t end = start + block->size;
  auto next = heap.holes.lower_bound(start);
  if (next != heap.holes.end() && next->first == end) {
    end += next->second;
    next = heap.holes.erase(next);
  }
  if (next != heap.holes.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == start) {
      start = before->first;
    }
  }
  heap.holes[start] = end - start;
  delete block;
}

void empty_cache(int device) {
  auto& heap = sim::heap(device);
  synchronize_device(device); // another stream may get the memory next
  retire_reached(heap);
  synchronize_device(device);
  for (auto& entry : heap.cached) {
    for (auto* block : entry.second) {
      give_back(heap, block);
    }
  }
  heap.cached.clear();
}

Block* carve(Heap& heap, size_t size) {
  if (static_cast<size_t>(heap.stats.reserved_bytes[0].current) + size > heap.capacity) {
    return nullptr;
  }
  for (auto hole = heap.holes.begin(); hole != heap.holes.end(); ++hole) {
    auto [start, length] = *hole;
    if (length < size) {
      continue;
    }
    heap.holes.erase(hole);
    if (length > size) {
      heap.holes[start + size] = length - size;
    }
    add(heap.stats.segment, 1);
    add(heap.stats.reserved_bytes, size);
    heap.stats.num_device_alloc += 1;
    return new Block{heap.hidden + start, size};
  }
  return nullptr;
}

[[noreturn]] void raise_out_of_memory(Heap& heap, int device, size_t bytes) {
  heap.stats.num_ooms += 1;
  if (heap.has_words) {
    TORCH_CHECK(false, heap.words);
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes, " bytes. Device ", device, " has ",
      heap.capacity, " bytes, of which ", heap.stats.allocated_bytes[0].current, " are allocated.");
  std::abort();
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& heap = sim::heap(block->device);
  std::lock_guard<std::mutex> lock(heap.mutex);
  subtract(heap.stats.allocation, 1);
  subtract(heap.stats.allocated_bytes, block->size);
  for (auto user : block->users) {
    block->pending.push_back(record(stream_of(*block, user)));
  }
  block->users.clear();
  if (block->pending.empty()) {
    retire(heap, block);
  } else {
    heap.pending.push_back(block);
  }
}

c10::DataPtr allocate(size_t requested) {
  int device = current_device;
  if (requested == 0) {
    return {nullptr, c10::Device(kSim, device)};
  }
  auto stream = current_stream(device).id();
  size_t size = (requested + kRoundBytes - 1) / kRoundBytes * kRoundBytes;
  auto& heap = sim::heap(device);
  std::lock_guard<std::mutex> lock(heap.mutex);
  retire_reached(heap);
  auto& same_size = heap.cached[{stream, size}];
  Block* block = nullptr;
  if (!same_size.empty()) {
    block = same_size.back();
    same_size.pop_back();
  } else {
    block = carve(heap, size);
    if (block == nullptr) {
      heap.stats.num_alloc_retries += 1;
      empty_cache(device);
      block = carve(heap, size);
    }
    if (block == nullptr) {
      raise_out_of_memory(heap, device, requested);
    }
    block->device = device;
    block->stream = stream;
    poison(*block);
  }
  block->requested = requested;
  add(heap.stats.allocation, 1);
  add(heap.stats.allocated_bytes, block->size);
  add(heap.stats.active, 1);
  add(heap.stats.active_bytes, block->size);
  add(heap.stats.requested_bytes, requested);
  heap.most_active = std::max(heap.most_active, heap.stats.active_bytes[0].current);
  return {block->address, block, free_block, c10::Device(kSim, device)};
}

void copy_device_data(void* target, const void* source, size_t bytes) {
  synchronize(current_stream(current_device));
  std::memcpy(readable(target), readable(source), bytes);
}

struct CachingAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return sim::allocate(bytes);
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    copy_device_data(target, source, bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    for (int device = 0; device < kDevices; ++device) {
      std::lock_guard<std::mutex> lock(heap(device).mutex);
      sim::empty_cache(device);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data, stream);
  }
  Stats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(heap(device).mutex);
    return heap(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(heap(device).mutex);
    size_t reserved = heap(device).stats.reserved_bytes[0].current;
    return {heap(device).capacity - std::min(reserved, heap(device).capacity), heap(device).capacity};
  }

 private:
  template <typename Function>
  void each(int device, Function function) {
    std::lock_guard<std::mutex> lock(heap(device).mutex);
    auto& stats = heap(device).stats;
    for (auto* stat :
         {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
          &stats.active_bytes, &stats.requested_bytes}) {
      function((*stat)[0]);
    }
  }
};

// The same memory from an allocator that has no statistics, such as CUDAPluggableAllocator.
struct PlainAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return sim::allocate(bytes);
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    copy_device_data(target, source, bytes);
  }
};

CachingAllocator& caching_allocator() {
  static auto* allocator = new CachingAllocator();
  return *allocator;
}

PlainAllocator& plain_allocator() {
  static auto* allocator = new PlainAllocator();
  return *allocator;
}

// Pinned host memory. A copy that is under way holds it, so it is freed after that.
struct Pinned {
  std::mutex mutex;
  std::map<const char*, std::pair<size_t, std::weak_ptr<void>>> blocks;
};

Pinned& pinned() {
  static auto* all = new Pinned();
  return *all;
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 64, bytes) == 0, "sim: host is out of memory");
    std::shared_ptr<void> memory(address, [](void* freed) {
      std::unique_lock<std::mutex> lock(pinned().mutex);
      pinned().blocks.erase(static_cast<char*>(freed));
      lock.unlock();
      std::free(freed);
    });
    std::lock_guard<std::mutex> lock(pinned().mutex);
    pinned().blocks[static_cast<char*>(address)] = {bytes, memory};
    return {address, new std::shared_ptr<void>(memory), release, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
  bool record_event(void* /*pointer*/, void* /*context*/, c10::Stream /*stream*/) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void release(void* context) {
    delete static_cast<std::shared_ptr<void>*>(context);
  }
};

PinnedAllocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return *allocator;
}

} // namespace

c10::Allocator* device_allocator() {
  return c10::GetAllocator(kSim);
}

void* readable(const void* device_pointer) {
  return const_cast<char*>(static_cast<const char*>(device_pointer)) + kRangeBytes;
}

void record_use(const c10::DataPtr& data, const c10::Stream& stream) {
  auto* block = static_cast<Block*>(data.get_context());
  if (block != nullptr && stream.id() != block->stream) {
    std::lock_guard<std::mutex> lock(heap(block->device).mutex);
    block->users.insert(stream.id());
  }
}

std::shared_ptr<void> pinned_memory(const void* host_pointer) {
  auto& all = pinned();
  const auto* pointer = static_cast<const char*>(host_pointer);
  std::lock_guard<std::mutex> lock(all.mutex);
  auto after = all.blocks.upper_bound(pointer);
  if (after == all.blocks.begin()) {
    return nullptr;
  }
  auto block = std::prev(after);
  return pointer < block->first + block->second.first ? block->second.second.lock() : nullptr;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  int device = storage.device().index();
  c10::DeviceGuard guard(storage.device());
  auto data = bytes == 0 ? c10::DataPtr(nullptr, storage.device()) : device_allocator()->allocate(bytes);
  size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    void* target = readable(data.get());
    void* source = readable(storage.data());
    enqueue(current_stream(device), [=] { std::memcpy(target, source, kept); });
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

// --- random numbers --------------------------------------------------------------------------------------------------

namespace {

// As on CUDA, the state is a seed and a position, and the host moves the position when it starts a kernel.
struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(int device)
      : c10::GeneratorImpl(c10::Device(kSim, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
        "sim: the state of a generator must be 16 bytes");
    const auto* values = static_cast<const uint64_t*>(state.data());
    seed_ = values[0];
    offset_ = values[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* values = static_cast<uint64_t*>(state.data_ptr());
    values[0] = seed_;
    values[1] = offset_;
    return state.getIntrusivePtr();
  }

 private:
  SimGenerator* clone_impl() const override {
    auto* copy = new SimGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(int device) {
  static auto* all = new at::Generator[kDevices]{
      at::make_generator<SimGenerator>(0), at::make_generator<SimGenerator>(1)};
  return all[device < 0 ? current_device : device];
}

} // namespace

at::Generator draw(const std::optional<at::Generator>& given, int device) {
  auto generator = given.has_value() && given->defined() ? *given : default_generator(device);
  TORCH_CHECK(generator.device().type() == kSim, "sim: the generator must be of this device");
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto seed = generator.current_seed();
  auto offset = generator.get_offset();
  generator.set_offset(offset + 1);
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ull + offset);
}

// --- what torch asks -------------------------------------------------------------------------------------------------

namespace {

struct Event {
  int device;
  bool is_timed;
  std::shared_ptr<Mark> mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kSim, current_device);
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "sim: there is no device ", int(device.index()));
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/ = false) const override {
    return getNewStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/ = 0) const override {
    static std::atomic<int> count[kDevices];
    int index = device.has_index() ? device.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, index), 1 + count[index]++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> lock(streams().mutex);
    return queue_of(stream).finished == queue_of(stream).queued;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }
  bool isStreamCapturing(const c10::Stream& /*stream*/) const { // overrides since torch 2.13
    return settings().capturing != 0;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag flag)
      const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(), "sim: an event of device ", int(device),
        " cannot be recorded on a stream of device ", int(stream.device_index()));
    if (*event == nullptr) {
      *event = new Event{stream.device_index(), flag == c10::EventFlag::BACKEND_DEFAULT, nullptr};
    }
    static_cast<Event*>(*event)->mark = sim::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_on_stream(stream, static_cast<Event*>(event)->mark);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || is_reached(*static_cast<Event*>(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      auto mark = static_cast<Event*>(event)->mark;
      wait_until(queue_of(mark->stream), mark->number);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*device*/) const override {
    auto* start = static_cast<Event*>(first);
    auto* end = static_cast<Event*>(second);
    TORCH_CHECK(settings().event_times != 0, "sim: this backend doesn't support elapsedTime.");
    TORCH_CHECK(start->is_timed && end->is_timed, "sim: both events must be created with enable_timing=True");
    TORCH_CHECK(start->device == end->device, "sim: the events are of different devices");
    return end->mark->milliseconds - start->mark->milliseconds;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice(c10::Device(kSim, device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(c10::Device(kSim, device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device = -1) const override {
    return at::make_generator<SimGenerator>(device < 0 ? current_device : device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    for (int device = 0; device < kDevices; ++device) {
      auto* start = heap(device).hidden;
      if (data >= start && data < start + kRangeBytes) {
        return c10::Device(kSim, device);
      }
    }
    TORCH_CHECK(false, "sim: this is no device memory");
  }
  bool isPinnedPtr(const void* data) const override {
    return pinned_memory(data) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

c10::impl::DeviceGuardImplRegistrar register_guard(kSim, new Guard());

[[maybe_unused]] const bool is_registered = [] {
  c10::SetAllocator(kSim, &caching_allocator());
  at::setHostAllocator(kSim, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// --- what device.py calls --------------------------------------------------------------------------------------------

void set(const std::string& name, int64_t value) {
  auto& all = settings();
  std::map<std::string, std::atomic<int64_t>*> by_name{
      {"default_pace", &all.default_pace},
      {"other_pace", &all.other_pace},
      {"event_times", &all.event_times},
      {"capturing", &all.capturing},
      {"dropout_rounds_alike", &all.dropout_rounds_alike}};
  TORCH_CHECK(by_name.count(name) == 1, "sim: there is no setting ", name);
  *by_name[name] = value;
  std::lock_guard<std::mutex> lock(streams().mutex);
  streams().changed.notify_all();
}

void set_statistics(bool has_statistics) {
  c10::SetAllocator(
      kSim, has_statistics ? static_cast<c10::Allocator*>(&caching_allocator()) : &plain_allocator());
}

void set_capacity(int64_t device, std::optional<int64_t> bytes, std::optional<std::string> words) {
  std::lock_guard<std::mutex> lock(heap(device).mutex);
  heap(device).capacity = bytes.value_or(kDefaultBytes);
  heap(device).has_words = words.has_value();
  heap(device).words = words.value_or("");
}

c10::Dict<std::string, int64_t> count(int64_t device) {
  std::lock_guard<std::mutex> lock(heap(device).mutex);
  const auto& stats = heap(device).stats;
  c10::Dict<std::string, int64_t> counts;
  counts.insert("bytes_to_host", counters(device).bytes_to_host);
  counts.insert("bytes_from_host", counters(device).bytes_from_host);
  counts.insert("allocated_bytes", stats.allocated_bytes[0].current);
  counts.insert("active_bytes", stats.active_bytes[0].current);
  counts.insert("peak_bytes", heap(device).most_active);
  counts.insert("reserved_bytes", stats.reserved_bytes[0].current);
  return counts;
}

void reset_peak(int64_t device) {
  std::lock_guard<std::mutex> lock(heap(device).mutex);
  heap(device).most_active = heap(device).stats.active_bytes[0].current;
}

at::Tensor get_state(int64_t device) {
  auto generator = default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state(int64_t device, const at::Tensor& state) {
  auto generator = default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

void set_seed(int64_t device, int64_t seed) {
  auto generator = default_generator(device);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(static_cast<uint64_t>(seed));
}

} // namespace

TORCH_LIBRARY_FRAGMENT(sim, m) {
  m.def("set(str name, int value) -> ()", set);
  m.def("set_statistics(bool has_statistics) -> ()", set_statistics);
  m.def("set_capacity(int device, int? bytes, str? words) -> ()", set_capacity);
  m.def("count(int device) -> Dict(str, int)", count);
  m.def("reset_peak(int device) -> ()", reset_peak);
  m.def("get_state(int device) -> Tensor", get_state);
  m.def("set_state(int device, Tensor state) -> ()", set_state);
  m.def("set_seed(int device, int seed) -> ()", set_seed);
}

} // namespace sim
