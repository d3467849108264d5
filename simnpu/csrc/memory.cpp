#include "memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "simulator.h"

namespace simnpu {
namespace {

constexpr size_t kGranularity = 512;
// Address space costs nothing; with eight times the limit, gaps between blocks hardly ever matter.
constexpr size_t kSpread = 8;

char* map_file(int file, size_t size, int protection) {
  void* address = mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(address != MAP_FAILED, "simnpu: can't map ", size, " bytes of address space: ",
              std::strerror(errno), "; is it limited (ulimit -v)?");
  // A forked child gets neither mapping: it would write into its parent's device memory.
  madvise(address, size, MADV_DONTFORK);
  return static_cast<char*>(address);
}

void finish_free(Block* block) {
  auto& simulator = Simulator::get();
  auto& arena = simulator.arena(block->device);
  std::memset(arena.shadow_of(block->address), block->poison, block->size);
  arena.give_back(block->address, block->size);
  arena.used -= block->size;
  arena.requested -= block->requested;
  block->freed = true;
  Block::release(block);
}

// The deleter of device memory: the block is freed when its stream, and every stream that
// record_stream named, have done the work that they have now.
void free_device(void* context) {
  auto* block = static_cast<Block*>(context);
  auto& simulator = Simulator::get();
  if (simulator.forked()) {
    return;
  }
  Lock lock;
  for (Queue* user : block->users) {
    if (user != block->queue && !user->ops.empty()) {
      simulator.wait(*block->queue, simulator.record(*user, nullptr), nullptr);
    }
  }
  if (block->queue->ops.empty()) {
    finish_free(block);
  } else {
    simulator.enqueue(*block->queue, {"free", [block] { finish_free(block); }, nullptr, nullptr});
  }
}

char* take_or_flush(Simulator& simulator, Arena& arena, c10::DeviceIndex device, size_t size) {
  char* address = arena.used + size <= arena.limit ? arena.take(size) : nullptr;
  if (address == nullptr) {
    // Runs pending frees and tries once more, as a caching allocator does.
    simulator.drain_device(device);
    address = arena.used + size <= arena.limit ? arena.take(size) : nullptr;
  }
  return address;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_device(bytes, kPoison); }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    auto& simulator = Simulator::get();
    std::memcpy(simulator.shadow(target), simulator.shadow(source), bytes);
  }
  bool initialized() override { return true; }
  // There is no cache to empty, but a real device synchronises for this.
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    auto& simulator = Simulator::get();
    for (int i = 0; i < simulator.device_count(); ++i) {
      simulator.synchronize_device(static_cast<c10::DeviceIndex>(i));
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    const auto& arena = Simulator::get().arena(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& stat, size_t current, size_t peak) {
      stat[0].current = static_cast<int64_t>(current);
      stat[0].peak = static_cast<int64_t>(peak);
    };
    set(stats.allocated_bytes, arena.used, arena.peak);
    set(stats.active_bytes, arena.used, arena.peak);
    set(stats.requested_bytes, arena.requested, arena.requested);
    set(stats.reserved_bytes, arena.reserved(), arena.reserved());
    stats.allocation[0].allocated = static_cast<int64_t>(arena.allocations);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock;
    Simulator::get().arena(device).allocations = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock;
    auto& arena = Simulator::get().arena(device);
    arena.peak = arena.used;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device)
#if TORCH_VERSION_MINOR >= 10
      override
#endif
  {
    Lock lock;
    const auto& arena = Simulator::get().arena(device);
    return {arena.limit - arena.used, arena.limit};
  }
};

Allocator& allocator() {
  static auto* allocator = new Allocator;
  return *allocator;
}

}  // namespace

Arena::Arena(size_t limit_bytes) : limit(limit_bytes), capacity_(limit_bytes * kSpread) {
  const int file = memfd_create("simnpu", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(capacity_)) == 0,
              "simnpu: can't make a memory file of ", capacity_, " bytes: ", std::strerror(errno));
  base_ = map_file(file, capacity_, PROT_NONE);
  shadow_ = map_file(file, capacity_, PROT_READ | PROT_WRITE);
  close(file);
  add_range(0, capacity_);
}

bool Arena::owns(const void* address) const {
  auto* byte = static_cast<const char*>(address);
  return byte >= base_ && byte < base_ + capacity_;
}

void* Arena::shadow_of(const void* address) const {
  return shadow_ + (static_cast<const char*>(address) - base_);
}

const void* Arena::device_address_of(const void* shadow) const {
  auto* byte = static_cast<const char*>(shadow);
  const bool inside = byte >= shadow_ && byte < shadow_ + capacity_;
  return inside ? base_ + (byte - shadow_) : nullptr;
}

void Arena::add_range(size_t offset, size_t size) {
  free_by_offset_.emplace(offset, size);
  free_by_size_.emplace(size, offset);
}

void Arena::remove_range(std::map<size_t, size_t>::iterator range) {
  free_by_size_.erase({range->second, range->first});
  free_by_offset_.erase(range);
}

char* Arena::take(size_t size) {
  auto found = free_by_size_.lower_bound({size, 0});
  if (found == free_by_size_.end()) {
    return nullptr;
  }
  const auto [room, offset] = *found;
  remove_range(free_by_offset_.find(offset));
  if (room > size) {
    add_range(offset + size, room - size);
  }
  top_ = std::max(top_, offset + size);
  return base_ + offset;
}

void Arena::give_back(char* address, size_t size) {
  auto offset = static_cast<size_t>(address - base_);
  auto next = free_by_offset_.lower_bound(offset);
  if (next != free_by_offset_.end() && next->first == offset + size) {
    size += next->second;
    remove_range(next);
  }
  auto previous = free_by_offset_.lower_bound(offset);
  if (previous != free_by_offset_.begin() && (--previous)->first + previous->second == offset) {
    offset = previous->first;
    size += previous->second;
    remove_range(previous);
  }
  add_range(offset, size);
}

void Block::release(void* block) {
  auto* held = static_cast<Block*>(block);
  if (held->holders.fetch_sub(1) == 1) {
    delete held;
  }
}

c10::DataPtr allocate_device(size_t bytes, unsigned char poison) {
  auto& simulator = Simulator::get();
  simulator.check_usable();
  const auto index = current_device();
  const c10::Device device(kDevice, index);
  if (bytes == 0) {
    return {nullptr, nullptr, &c10::detail::deleteNothing, device};
  }
  Lock lock;
  auto& arena = simulator.arena(index);
  const size_t size = (bytes + kGranularity - 1) / kGranularity * kGranularity;
  char* address = take_or_flush(simulator, arena, index, size);
  TORCH_CHECK_WITH(OutOfMemoryError, address != nullptr, "simnpu: out of memory on ", device,
                   ": asked for ", bytes, " bytes, ", arena.used, " of ", arena.limit,
                   " are in use; install(memory_bytes=...) sets the limit");
  arena.used += size;
  arena.requested += bytes;
  arena.peak = std::max(arena.peak, arena.used);
  ++arena.allocations;
  std::memset(arena.shadow_of(address), poison, size);
  auto* block = new Block{address, size, bytes, index, &simulator.current_queue(index), {}, poison};
  return {address, block, &free_device, device};
}

Block* block_of(const c10::DataPtr& data) {
  const bool ours = data.get_deleter() == &free_device || data.get_deleter() == &Block::release;
  return ours ? static_cast<Block*>(data.get_context()) : nullptr;
}

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  if (Block* block = block_of(data)) {
    Lock lock;
    Queue* queue = &Simulator::get().queue(stream.device_index(), stream.id());
    if (std::find(block->users.begin(), block->users.end(), queue) == block->users.end()) {
      block->users.push_back(queue);
    }
  }
}

c10::Allocator* device_allocator() { return &allocator(); }

void register_device_allocator() { c10::SetAllocator(kDevice, &allocator()); }

}  // namespace simnpu
