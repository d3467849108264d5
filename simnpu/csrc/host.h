// Host memory that copies use: pinned allocations, and a watch over what a pending copy needs.
#pragma once

#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>

namespace simnpu {

// A pinned allocation. Pending copies hold it, since a real pinned allocator doesn't reuse memory
// before the copies from it are done. `freed` says that its owner has released it.
struct Pinned {
  char* address;
  size_t bytes;
  std::atomic<bool> freed{false};
  ~Pinned();
};

// A host range that a pending copy will read or write.
struct HostAccess {
  uintptr_t begin, end;
  std::function<uint64_t()> digest;  // of the elements in the range, as they are now
  uint64_t expected = 0;
  bool is_known = true;  // whether `expected` is up to date
};

class HostMemory {
 public:
  // Pinned memory has its own lock: it is used from anywhere, also under any other lock.
  std::shared_ptr<Pinned> allocate(size_t bytes, size_t limit_bytes);
  void release(void* address);
  // The allocation that this address lies in, or null.
  std::shared_ptr<Pinned> find(const void* address);
  size_t pinned_bytes();
  size_t pinned_peak();
  // Makes a new lock in a forked child, since a thread of the parent may have held the old one.
  void after_fork() { new (&pinned_mutex_) std::mutex; }

  // The functions below are called under the simulator's lock.
  void add_access(std::shared_ptr<HostAccess> access);
  void remove_access(const HostAccess& access);
  bool is_accessed(uintptr_t begin, uintptr_t end);
  // A copy has written here, so the other copies expect the new content. Their streams gave the
  // order, so this is no mistake.
  void renew_expectations(uintptr_t begin, uintptr_t end);

 private:
  void for_each_overlapping(uintptr_t begin, uintptr_t end,
                            const std::function<void(HostAccess&)>& visit);

  std::mutex pinned_mutex_;
  std::map<const char*, std::shared_ptr<Pinned>> pinned_;
  size_t pinned_bytes_ = 0, pinned_peak_ = 0;
  std::multimap<uintptr_t, std::shared_ptr<HostAccess>> accesses_;
  uintptr_t longest_ = 0;  // the longest range since accesses_ was empty: limits the search
};

void register_host_allocator();

}  // namespace simnpu
