#include "host.h"

#include <ATen/core/CachingHostAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "simulator.h"

namespace simnpu {
namespace {

constexpr unsigned char kFreedPinned = 0xDB;
// If more copies are pending on the same memory, only this many are updated after each copy: they
// run next. The others are updated later.
constexpr size_t kMostRenewed = 4;

void free_pinned(void* address) { Simulator::get().host.release(address); }

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto& simulator = Simulator::get();
    simulator.check_usable();
    auto pinned = simulator.host.allocate(bytes, simulator.policy.pinned_limit_bytes);
    return {pinned->address, pinned->address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
  bool record_event(void* /*address*/, void* /*context*/, c10::Stream /*stream*/) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    auto& host = Simulator::get().host;
    at::HostStats stats;
    stats.allocated_bytes.current = static_cast<int64_t>(host.pinned_bytes());
    stats.allocated_bytes.peak = static_cast<int64_t>(host.pinned_peak());
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

Pinned::~Pinned() {
  std::memset(address, kFreedPinned, bytes);
  munmap(address, std::max<size_t>(bytes, 1));
}

std::shared_ptr<Pinned> HostMemory::allocate(size_t bytes, size_t limit_bytes) {
  std::lock_guard<std::mutex> guard(pinned_mutex_);
  TORCH_CHECK(bytes <= limit_bytes && pinned_bytes_ <= limit_bytes - bytes,
              "simnpu: can't pin ", bytes, " bytes of host memory: ", pinned_bytes_, " of ",
              limit_bytes, " are pinned; the limit is set_policy(pinned_limit_bytes=...)");
  void* address = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "simnpu: can't map ", bytes, " bytes of host memory: ",
              std::strerror(errno));
  std::memset(address, kPoison, bytes);
  auto pinned = std::make_shared<Pinned>();
  pinned->address = static_cast<char*>(address);
  pinned->bytes = bytes;
  pinned_[pinned->address] = pinned;
  pinned_bytes_ += bytes;
  pinned_peak_ = std::max(pinned_peak_, pinned_bytes_);
  return pinned;
}

void HostMemory::release(void* address) {
  std::shared_ptr<Pinned> pinned;  // unmapped after the lock is released, if nobody else holds it
  std::lock_guard<std::mutex> guard(pinned_mutex_);
  auto found = pinned_.find(static_cast<const char*>(address));
  if (found != pinned_.end()) {
    pinned = found->second;
    pinned->freed = true;
    pinned_bytes_ -= pinned->bytes;
    pinned_.erase(found);
  }
}

std::shared_ptr<Pinned> HostMemory::find(const void* address) {
  auto* byte = static_cast<const char*>(address);
  std::lock_guard<std::mutex> guard(pinned_mutex_);
  auto next = pinned_.upper_bound(byte);
  if (next == pinned_.begin()) {
    return nullptr;
  }
  const auto& pinned = std::prev(next)->second;
  return byte < pinned->address + std::max<size_t>(pinned->bytes, 1) ? pinned : nullptr;
}

size_t HostMemory::pinned_bytes() {
  std::lock_guard<std::mutex> guard(pinned_mutex_);
  return pinned_bytes_;
}

size_t HostMemory::pinned_peak() {
  std::lock_guard<std::mutex> guard(pinned_mutex_);
  return pinned_peak_;
}

void HostMemory::add_access(std::shared_ptr<HostAccess> access) {
  const uintptr_t length = access->end - access->begin;
  longest_ = accesses_.empty() ? length : std::max(longest_, length);
  const uintptr_t begin = access->begin;
  accesses_.emplace(begin, std::move(access));
}

void HostMemory::remove_access(const HostAccess& access) {
  auto [first, last] = accesses_.equal_range(access.begin);
  auto found = std::find_if(first, last, [&](auto& entry) { return entry.second.get() == &access; });
  if (found != last) {
    accesses_.erase(found);
  }
}

void HostMemory::for_each_overlapping(uintptr_t begin, uintptr_t end,
                                      const std::function<void(HostAccess&)>& visit) {
  auto first = accesses_.lower_bound(begin > longest_ ? begin - longest_ : 0);
  for (auto entry = first; entry != accesses_.end() && entry->first < end; ++entry) {
    if (entry->second->end > begin) {
      visit(*entry->second);
    }
  }
}

bool HostMemory::is_accessed(uintptr_t begin, uintptr_t end) {
  bool found = false;
  for_each_overlapping(begin, end, [&](HostAccess&) { found = true; });
  return found;
}

void HostMemory::renew_expectations(uintptr_t begin, uintptr_t end) {
  size_t renewed = 0;
  for_each_overlapping(begin, end, [&](HostAccess& access) {
    access.is_known = renewed++ < kMostRenewed;
    if (access.is_known) {
      access.expected = access.digest();
    }
  });
}

void register_host_allocator() {
  static auto* allocator = new HostAllocator;
  at::setHostAllocator(kDevice, allocator);
}

}  // namespace simnpu
