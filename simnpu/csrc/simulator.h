// The simulator: one object that owns devices, queues, host allocations, policy and violations.
//
// Locks. There are two: Python's interpreter lock (GIL) and the simulator's. A thread that needs
// both takes the GIL first. So code under the simulator's lock must not touch Python: closures hold
// only tensors that Python has never seen, and what Python may own is dropped by `Lock` after it
// has released the lock (see `retire`).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host.h"
#include "memory.h"
#include "origin.h"

namespace simnpu {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;

struct Queue;

// One recording of an event. An event that is recorded again gets a new mark, so that earlier waits
// keep the old mark.
struct Mark {
  Queue* queue;
  bool done = false;
  std::chrono::steady_clock::time_point time{};
};

// An operation of a stream: run `run`, or, if `wait` is set, wait for that mark.
struct Op {
  const char* name;  // lives as long as the process
  std::function<void()> run;
  Origin origin;
  std::shared_ptr<Mark> wait;
};

struct Queue {
  c10::DeviceIndex device;
  c10::StreamId stream;
  std::deque<Op> ops;
};

enum class Schedule { kLazy, kEager, kRandom, kThread };

struct Policy {
  bool pageable_async = true;    // non_blocking copies of pageable memory are asynchronous too
  bool strict_free = false;      // freeing pinned memory with a pending copy is a violation
  size_t pinned_limit_bytes = SIZE_MAX;
};

struct Counts {
  uint64_t enqueued = 0;
  uint64_t queued_kernels = 0;   // kernels whose result shapes were known at the call
  uint64_t blocking_kernels = 0; // kernels that had to run at once: shapes depend on data
  std::map<std::string, uint64_t> blocking_names;
};

class Simulator {
 public:
  // Never destroyed: tensors may be freed after the last static destructor has run.
  static Simulator& get();

  void configure(int devices, size_t memory_bytes);
  int device_count() const { return static_cast<int>(arenas_.size()); }
  Arena& arena(c10::DeviceIndex device);
  // The address by which the host and kernels reach a device's `address`; null stays null.
  void* shadow(const void* address);
  // The reverse; returns an address unchanged if it isn't in any shadow.
  const void* unshadow(const void* address) const;
  // -1 if no device has this address.
  c10::DeviceIndex device_of(const void* address) const;

  // Queues live as long as the simulator.
  Queue& queue(c10::DeviceIndex device, c10::StreamId stream);
  Queue& current_queue(c10::DeviceIndex device);
  c10::StreamId new_stream(c10::DeviceIndex device);

  void enqueue(Queue& queue, Op op);
  std::shared_ptr<Mark> record(Queue& queue, Origin origin);
  void wait(Queue& queue, std::shared_ptr<Mark> mark, Origin origin);
  void drain(Queue& queue);
  void drain_device(c10::DeviceIndex device);
  void drain_all();
  void reach(const Mark& mark);
  void step(size_t count);
  // Runs one operation whenever a stream or an event is queried, so that loops which poll end.
  void poll(Queue* queue);
  size_t pending() const { return pending_; }

  // Synchronisations run what is due, then raise the violations found so far.
  void synchronize(Queue& queue);
  void synchronize_device(c10::DeviceIndex device);
  void raise_violations();
  void report(std::string violation);
  std::vector<std::string> take_violations();

  void set_schedule(const std::string& schedule, uint64_t seed, int delay_us);
  void reset();
  void shutdown();
  // Around fork(): the worker is stopped, so that it holds no lock (called without the GIL, which
  // it may need). Then the simulator's lock is held during the fork, so that the child's copy of
  // the state is consistent.
  void stop_worker();
  void before_fork();
  void after_fork(bool is_child);
  bool forked() const { return forked_; }
  bool stopped() const { return stopped_; }
  void check_usable() const;

  // Drops the storage after the lock is released, since its owner may be Python.
  void retire(c10::Storage storage) { graveyard_.push_back(std::move(storage)); }

  Policy policy;
  Counts counts;
  HostMemory host;

 private:
  friend class Lock;
  Simulator() = default;
  void run_front(Queue& queue);
  void pop_front(Queue& queue);
  bool step_random();
  void start_worker();
  void work();

  std::recursive_mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<std::unique_ptr<Arena>> arenas_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, std::unique_ptr<Queue>> queues_;
  std::vector<Queue*> ready_;  // the queues that have operations
  std::vector<c10::Storage> graveyard_;
  std::vector<std::string> violations_;
  size_t violations_left_out_ = 0;
  size_t pending_ = 0;
  c10::StreamId next_stream_ = 1;
  Schedule schedule_ = Schedule::kLazy;
  std::mt19937_64 random_{0};
  std::chrono::microseconds delay_{500};
  std::thread worker_;
  bool stop_worker_ = false;
  std::atomic<bool> forked_{false};
  std::atomic<bool> stopped_{false};
};

// Holds the simulator's lock; it may be nested.
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  static bool held_here();
};

// The calling thread's device and streams; each thread has its own, as in torch.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::StreamId current_stream(c10::DeviceIndex device);
void set_current_stream(c10::DeviceIndex device, c10::StreamId stream);

}  // namespace simnpu
