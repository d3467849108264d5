#include "guard.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include "factories.h"
#include "simulator.h"

namespace simnpu {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// What torch keeps for an event: its latest recording.
struct Event {
  std::shared_ptr<Mark> mark;
};

const std::shared_ptr<Mark>& mark_of(void* event) { return static_cast<Event*>(event)->mark; }

DeviceIndex index_of(Device device) {
  return device.index() >= 0 ? device.index() : current_device();
}

Stream stream_of(DeviceIndex device, c10::StreamId stream) {
  return Stream(Stream::UNSAFE, Device(kDevice, device), stream);
}

Queue& queue_of(const Stream& stream) {
  Lock lock;
  return Simulator::get().queue(stream.device_index(), stream.id());
}

DeviceIndex exchange_device(DeviceIndex device) {
  const auto before = current_device();
  if (device >= 0 && device != before) {
    set_current_device(device);
  }
  return before;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device device) const override {
    return {kDevice, exchange_device(device.index())};
  }
  Device getDevice() const override { return {kDevice, current_device()}; }
  void setDevice(Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < Simulator::get().device_count()) {
      set_current_device(device.index());
    }
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(Simulator::get().device_count());
  }
#if TORCH_VERSION_MINOR >= 10
  c10::DeviceCapability getDeviceCapability(Device /*device*/) const override { return {}; }
#endif

  Stream getStream(Device device) const override {
    return stream_of(index_of(device), current_stream(index_of(device)));
  }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getNewStream(Device device, int /*priority*/) const override {
    return stream_of(index_of(device), Simulator::get().new_stream(index_of(device)));
  }
  Stream getStreamFromGlobalPool(Device device, bool /*is_high_priority*/) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    set_current_stream(stream.device_index(), stream.id());
    return stream_of(stream.device_index(), before);
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock;
    Queue& queue = queue_of(stream);
    const bool is_done = queue.ops.empty();
    Simulator::get().poll(&queue);
    return is_done;
  }
  void synchronizeStream(const Stream& stream) const override {
    Simulator::get().synchronize(queue_of(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Simulator::get().synchronize_device(device >= 0 ? device : current_device());
  }
  void* getStreamNativeHandle(const Stream stream) const
#if TORCH_VERSION_MINOR >= 11
      override
#endif
  {
    return &queue_of(stream);
  }

  void record(void** event, const Stream& stream, DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    Simulator::get().check_usable();
    Origin origin = this_line();
    Lock lock;
    if (*event == nullptr) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->mark =
        Simulator::get().record(queue_of(stream), std::move(origin));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) {
      Origin origin = this_line();
      Lock lock;
      Simulator::get().wait(queue_of(stream), mark_of(event), std::move(origin));
    }
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    Lock lock;
    const auto mark = mark_of(event);
    const bool is_done = mark->done;
    if (!is_done) {
      Simulator::get().poll(mark->queue);
    }
    return is_done;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      Lock lock;
      Simulator::get().check_usable();
      const auto mark = mark_of(event);
      Simulator::get().reach(*mark);
      Simulator::get().raise_violations();
    }
  }
  void destroyEvent(void* event, const DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* last, DeviceIndex /*device*/) const override {
    TORCH_CHECK(first != nullptr && last != nullptr,
                "simnpu: elapsed_time needs two events that were recorded");
    Lock lock;
    TORCH_CHECK(mark_of(first)->done && mark_of(last)->done,
                "simnpu: elapsed_time needs two events that are done; synchronize() them first");
    return std::chrono::duration<double, std::milli>(mark_of(last)->time - mark_of(first)->time)
        .count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_stream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(Simulator::get().device_count());
  }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return exchange_device(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchange_device(device < deviceCount() ? device : current_device());
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kDevice); }
  bool isPinnedPtr(const void* address) const override {
    return Simulator::get().host.find(address) != nullptr;
  }
  Device getDeviceFromPtr(void* address) const override {
    const auto device = Simulator::get().device_of(address);
    TORCH_CHECK(device >= 0, "simnpu: ", address, " isn't device memory");
    return {kDevice, device};
  }
  // The device has no generator: its random numbers come from the CPU's.
  const at::Generator& getDefaultGenerator(DeviceIndex /*device*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex /*device*/) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

void register_guard() {
  static Guard guard;
  static c10::impl::DeviceGuardImplRegistrar registrar(kDevice, &guard);
}

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

}  // namespace simnpu
