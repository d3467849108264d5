// Configuration, the lock, violations, and the two ends of a process: fork and exit.
#include "simulator.h"

#include <c10/util/Exception.h>

#include <cstdio>

namespace simnpu {
namespace {

constexpr size_t kMostViolations = 100;  // kept messages; the others are counted

thread_local int lock_depth = 0;
thread_local c10::DeviceIndex this_device = 0;
thread_local c10::StreamId this_stream[kMostDevices] = {};

}  // namespace

Simulator& Simulator::get() {
  static auto* simulator = new Simulator;
  return *simulator;
}

Lock::Lock() {
  Simulator::get().mutex_.lock();
  ++lock_depth;
}

Lock::~Lock() {
  auto& simulator = Simulator::get();
  std::vector<c10::Storage> dropped;
  if (lock_depth == 1) {
    dropped.swap(simulator.graveyard_);
  }
  --lock_depth;
  simulator.mutex_.unlock();
}

bool Lock::held_here() { return lock_depth > 0; }

c10::DeviceIndex current_device() { return this_device; }

void set_current_device(c10::DeviceIndex device) {
  const int count = Simulator::get().device_count();
  TORCH_CHECK(device >= 0 && device < count, "simnpu: device ", static_cast<int>(device),
              " isn't there: there are ", count);
  this_device = device;
}

c10::StreamId current_stream(c10::DeviceIndex device) { return this_stream[device]; }

void set_current_stream(c10::DeviceIndex device, c10::StreamId stream) {
  this_stream[device] = stream;
}

void Simulator::configure(int devices, size_t memory_bytes) {
  Lock lock;
  for (int i = 0; i < devices; ++i) {
    arenas_.push_back(std::make_unique<Arena>(memory_bytes));
  }
}

Arena& Simulator::arena(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "simnpu: device ", static_cast<int>(device),
              " isn't there: there are ", device_count());
  return *arenas_[device];
}

void* Simulator::shadow(const void* address) {
  if (address == nullptr) {
    return nullptr;
  }
  for (auto& arena : arenas_) {
    if (arena->owns(address)) {
      return arena->shadow_of(address);
    }
  }
  TORCH_CHECK(false, "simnpu: ", address, " isn't device memory");
}

const void* Simulator::unshadow(const void* address) const {
  for (auto& arena : arenas_) {
    if (const void* found = arena->device_address_of(address)) {
      return found;
    }
  }
  return address;
}

c10::DeviceIndex Simulator::device_of(const void* address) const {
  for (size_t i = 0; i < arenas_.size(); ++i) {
    if (arenas_[i]->owns(address)) {
      return static_cast<c10::DeviceIndex>(i);
    }
  }
  return -1;
}

void Simulator::report(std::string violation) {
  if (violations_.size() < kMostViolations) {
    violations_.push_back(std::move(violation));
  } else {
    ++violations_left_out_;
  }
}

std::vector<std::string> Simulator::take_violations() {
  std::vector<std::string> taken;
  taken.swap(violations_);
  if (violations_left_out_ > 0) {
    taken.push_back("simnpu: and " + std::to_string(violations_left_out_) + " more");
    violations_left_out_ = 0;
  }
  return taken;
}

void Simulator::raise_violations() {
  if (violations_.empty()) {
    return;
  }
  std::string message;
  for (auto& violation : take_violations()) {
    message += (message.empty() ? "" : "\n") + violation;
  }
  TORCH_CHECK(false, message);
}

void Simulator::reset() {
  set_schedule("lazy", 0, 500);
  Lock lock;
  policy = Policy();
  take_violations();
  this_device = 0;
  for (auto& stream : this_stream) {
    stream = 0;
  }
}

// Called while Python can still run. Afterwards nothing runs by itself, and no line is looked up.
void Simulator::shutdown() {
  stop_worker();
  Lock lock;
  stopped_ = true;
  for (auto& violation : take_violations()) {
    std::fprintf(stderr, "%s\n(found before the process ended, but nothing synchronised after it)\n",
                 violation.c_str());
  }
}

void Simulator::before_fork() {
  mutex_.lock();
  ++lock_depth;
}

void Simulator::after_fork(bool is_child) {
  --lock_depth;
  if (!is_child) {
    start_worker();
    mutex_.unlock();
    return;
  }
  // Both are made again, since threads of the parent own them: a child's thread has another id.
  new (&mutex_) std::recursive_mutex;
  new (&changed_) std::condition_variable_any;
  host.after_fork();
  forked_ = true;
  schedule_ = Schedule::kLazy;
}

void Simulator::check_usable() const {
  TORCH_CHECK(!forked_, "simnpu: this process was forked from one that uses simnpu, and has no ",
              "device: its memory belongs to the parent. Start processes with the method 'spawn'");
  TORCH_CHECK(!arenas_.empty(), "simnpu: there is no device yet; call simnpu.install() first");
}

}  // namespace simnpu
