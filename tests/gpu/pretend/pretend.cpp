// What a CPU build of torch lacks to accept tensors on CUDA devices: a device guard, hooks, pinned
// memory, and the clock of DDP's reducer. It allocates no device memory and launches no kernel.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <mutex>
#include <set>

using namespace c10;

static DeviceIndex device_count = 1;
static thread_local DeviceIndex current = 0;

extern "C" void set_device_count(int count) { device_count = count; }

static DeviceIndex exchange(DeviceIndex index) {
  DeviceIndex before = current;
  if (index >= 0) current = index;
  return before;
}

// All streams are the default stream, on which everything has been done already.
struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device device) const override { return {kCUDA, exchange(device.index())}; }
  Device getDevice() const override { return {kCUDA, current}; }
  void setDevice(Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  Stream getStream(Device device) const override {
    return Stream(Stream::DEFAULT, device.index() < 0 ? getDevice() : device);
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

static std::mutex lock;
static std::set<const void*> pinned;

static void unpin(void* data) {
  {
    std::lock_guard<std::mutex> guard(lock);
    pinned.erase(data);
  }
  free_cpu(data);
}

struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t size) override {
    void* data = alloc_cpu(size ? size : 1);
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert(data);
    return {data, data, &unpin, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};
static PinnedAllocator allocator;

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  int getNumGPUs() const override { return device_count; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { exchange(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index); }
  void deviceSynchronize(DeviceIndex) const override {}
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(lock);
    return pinned.count(data);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &allocator; }
  // the host's random numbers, so that a run draws the same ones as on the CPU
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

// torch keeps the hooks of its first question about CUDA for good: a fork of a process that has
// asked it has the empty ones. They have no data, so that these can take their place in memory.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
static void* hooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();

struct Clock final : c10d::Timer {
  explicit Clock(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return getTimeRef(end) - getTimeRef(start);
  }
};
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::Clock)
}
