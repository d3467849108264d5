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

// A device's memory. torch sees addresses in a mapping that nobody may access, so that an access by
// the host ends in SIGSEGV; kernels use a second mapping of the same pages. The protection never
// changes, so the host has no access at any moment.
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
  // The bytes up to the highest address ever used, which a caching allocator would have reserved.
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

// A piece of device memory. Queued operations hold the block, to see whether it was freed before
// they ran. Another block may have its memory by then.
struct Block {
  char* address;
  size_t size, requested;
  c10::DeviceIndex device;
  Queue* queue;                // the queue of the stream that allocated the block
  std::vector<Queue*> users;   // the queues of the streams that record_stream named
  unsigned char poison;
  bool freed = false;
  std::atomic<int> holders{1};

  static void release(void* block);  // the deleter for every holder
};

// Every pattern of an integer is a value; this one is no valid index and no valid count.
constexpr unsigned char kPoison = 0xFD;
constexpr unsigned char kNaNPoison = 0xFF;

// Memory of the current device, filled with `poison`, which is freed in the current stream's order.
// Raises OutOfMemoryError.
c10::DataPtr allocate_device(size_t bytes, unsigned char poison);
// The block of a device tensor's storage; null for one without memory.
Block* block_of(const c10::DataPtr& data);
void record_stream(const c10::DataPtr& data, c10::Stream stream);

c10::Allocator* device_allocator();
void register_device_allocator();

}  // namespace simnpu
