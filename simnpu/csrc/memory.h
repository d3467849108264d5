// Device memory: one memory file mapped twice, and an allocator whose frees happen in stream order.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace simnpu {

struct Queue;

// A device's memory. Addresses that torch sees lie in a mapping that nobody may touch, so that a
// host access ends in SIGSEGV; kernels use a second mapping of the same pages. No protection is
// ever changed, so there is no moment in which the wrong side could get through.
class Arena {
 public:
  explicit Arena(size_t limit_bytes);  // lives as long as the process

  bool owns(const void* address) const;
  void* shadow_of(const void* address) const;
  // Null if the address isn't in the shadow.
  const void* device_address_of(const void* shadow) const;

  // The best fitting free range, or null. `size` is a multiple of 512.
  char* take(size_t size);
  void give_back(char* address, size_t size);

  size_t limit, used = 0, peak = 0, allocations = 0, requested = 0;
  // Up to where memory was ever handed out: what a caching allocator would have reserved.
  size_t reserved() const { return top_; }

 private:
  void add_range(size_t offset, size_t size);
  void remove_range(std::map<size_t, size_t>::iterator range);

  char* base_;
  char* shadow_;
  size_t capacity_;
  size_t top_ = 0;
  std::map<size_t, size_t> free_by_offset_;
  std::set<std::pair<size_t, size_t>> free_by_size_;
};

// A piece of device memory. Queued operations hold it, to see whether it was freed before they
// ran; its memory may by then belong to another block.
struct Block {
  char* address;
  size_t size, requested;
  c10::DeviceIndex device;
  Queue* queue;                // of the stream that allocated it
  std::vector<Queue*> users;   // of the streams that record_stream named
  unsigned char poison;
  bool freed = false;
  std::atomic<int> holders{1};

  static void release(void* block);  // the deleter of whoever holds it
};

// For integers, whose every pattern is a value, it is one that no index and no count has.
constexpr unsigned char kPoison = 0xFD;
constexpr unsigned char kNaNPoison = 0xFF;

// Memory of the current device, filled with `poison`, to be freed in the current stream's order.
// Raises OutOfMemoryError.
c10::DataPtr allocate_device(size_t bytes, unsigned char poison);
// The block of a device tensor's storage; null for one without memory.
Block* block_of(const c10::DataPtr& data);
void record_stream(const c10::DataPtr& data, c10::Stream stream);

c10::Allocator* device_allocator();
void register_device_allocator();

}  // namespace simnpu
