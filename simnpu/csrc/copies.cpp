#include "copies.h"

#include <ATen/ops/_local_scalar_dense.h>

#include "refusals.h"
#include "tensors.h"

namespace simnpu {
namespace {

enum class Fate { kFine, kFreed, kChanged };

// The host side of an asynchronous copy, from the call until the copy has run: does somebody else
// still own its memory, and do its elements still hold what they held at the call?
class HostSide {
 public:
  // Made before the simulator's lock is taken: holding the storage may need the GIL.
  HostSide(const at::Tensor& tensor, std::shared_ptr<Pinned> pinned)
      : view(host_view(tensor)), pinned_(std::move(pinned)) {
    if (!pinned_) {
      storage_ = tensor.storage();
    }
  }

  // Called under the lock when the copy is issued. A target is poisoned, unless another pending
  // copy needs its content; then it is only watched.
  void begin(bool is_target) {
    auto& host = Simulator::get().host;
    const auto [begin, end] = span_of(view);
    if (is_target && !host.is_accessed(begin, end)) {
      fill_bytes(view, poison_of(view.scalar_type()));
    }
    access_ = std::make_shared<HostAccess>();
    access_->begin = begin;
    access_->end = end;
    access_->digest = [view = view] { return digest_of(view); };
    access_->expected = access_->digest();
    host.add_access(access_);
  }

  // Called once, under the lock, when the copy runs.
  Fate end() {
    auto& simulator = Simulator::get();
    simulator.host.remove_access(*access_);
    bool is_freed = false;
    if (pinned_) {
      is_freed = pinned_->freed && simulator.policy.strict_free;
    } else {
      is_freed = storage_.use_count() == 1 || storage_.data() != view.storage().data();
      simulator.retire(std::move(storage_));
    }
    if (is_freed) {
      return Fate::kFreed;
    }
    const bool is_changed = access_->is_known && access_->digest() != access_->expected;
    return is_changed ? Fate::kChanged : Fate::kFine;
  }

  void written() const { Simulator::get().host.renew_expectations(access_->begin, access_->end); }

  std::string describe_as(const char* role) const {
    return describe(view, role) + (pinned_ ? " (pinned)" : " (pageable)");
  }

  at::Tensor view;

 private:
  // One of these two keeps the memory. A storage that nobody else holds was freed.
  std::shared_ptr<Pinned> pinned_;
  c10::Storage storage_;
  std::shared_ptr<HostAccess> access_;
};

constexpr char kToHost[] = "copy to host";
constexpr char kToDevice[] = "copy to device";
constexpr char kOnDevice[] = "copy on device";

void run_copy(const at::Tensor& source, const at::Tensor& target) {
  check_alive(source, "source");
  check_alive(target, "target");
  const KernelScope scope;
  target.copy_(source);
}

void report(const char* name, Fate fate, const char* changed, const std::string& source,
            const std::string& target, const Origin& origin) {
  const std::string what = fate == Fate::kFreed ? "the host tensor was freed" : changed;
  const char* remedy = fate == Fate::kFreed ? "keep it" : "leave it alone";
  Simulator::get().report(std::string("simnpu: ") + name + ": " + what +
                          " before the copy ran; " + remedy +
                          " until an event recorded after the copy is done\n  " + source +
                          "\n  " + target + issued_at(origin));
}

bool is_asynchronous(bool non_blocking, const std::shared_ptr<Pinned>& pinned) {
  return non_blocking && (pinned || Simulator::get().policy.pageable_async);
}

void enqueue_to_host(Queue& queue, const at::Tensor& source, std::shared_ptr<HostSide> side,
                     const Origin& origin) {
  Lock lock;
  side->begin(/*is_target=*/true);
  Simulator::get().enqueue(queue, {kToHost, [source, side, origin] {
    const Fate fate = side->end();
    if (fate != Fate::kFine) {
      report(kToHost, fate, "the host target was written", describe(source, "source"),
             side->describe_as("target"), origin);
    }
    if (fate == Fate::kFreed) {
      return;
    }
    run_copy(source, side->view);
    side->written();
  }, origin, nullptr});
}

void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto& simulator = Simulator::get();
  const Origin origin = this_line();
  auto pinned = simulator.host.find(target.storage().data());
  auto view = kernel_view(source);
  Queue* queue;
  {
    Lock lock;
    queue = &simulator.current_queue(source.device().index());
  }
  if (is_asynchronous(non_blocking, pinned)) {
    enqueue_to_host(*queue, view, std::make_shared<HostSide>(target, pinned), origin);
    return;
  }
  auto host = host_view(target);
  auto copy = [view, host]() mutable { run_copy(view, host); };
  simulator.enqueue(*queue, {kToHost, copy, origin, nullptr});
  simulator.synchronize(*queue);
}

void enqueue_to_device(Queue& queue, std::shared_ptr<HostSide> side, const at::Tensor& target,
                       const Origin& origin) {
  Lock lock;
  side->begin(/*is_target=*/false);
  Simulator::get().enqueue(queue, {kToDevice, [side, target, origin]() mutable {
    const Fate fate = side->end();
    if (fate != Fate::kFine) {
      report(kToDevice, fate, "the host source was modified", side->describe_as("source"),
             describe(target, "target"), origin);
    }
    if (fate == Fate::kFreed) {
      fill_bytes(target, poison_of(target.scalar_type()));
      return;
    }
    run_copy(side->view, target);
  }, origin, nullptr});
}

void copy_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto& simulator = Simulator::get();
  const Origin origin = this_line();
  auto pinned = simulator.host.find(source.storage().data());
  auto view = kernel_view(target);
  Queue* queue;
  {
    Lock lock;
    queue = &simulator.current_queue(target.device().index());
  }
  if (is_asynchronous(non_blocking, pinned)) {
    enqueue_to_device(*queue, std::make_shared<HostSide>(source, pinned), view, origin);
    return;
  }
  // A driver stages pageable memory at a non-blocking copy, so that the call may return.
  auto host = host_view(source);
  if (non_blocking) {
    const KernelScope scope;
    host = host.clone();
  }
  auto copy = [host, view]() mutable { run_copy(host, view); };
  simulator.enqueue(*queue, {kToDevice, copy, origin, nullptr});
  if (!non_blocking) {
    simulator.synchronize(*queue);
  }
}

// A copy between devices runs in the source's stream, after the work that the target's stream had
// to do; the target's stream goes on after the copy. CUDA does the same.
void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
  auto& simulator = Simulator::get();
  const Origin origin = this_line();
  auto from = kernel_view(source);
  auto to = kernel_view(target);
  Lock lock;
  Queue& queue = simulator.current_queue(source.device().index());
  Queue& other = simulator.current_queue(target.device().index());
  if (&queue != &other) {
    simulator.wait(queue, simulator.record(other, origin), origin);
  }
  auto copy = [from, to]() mutable { run_copy(from, to); };
  simulator.enqueue(queue, {kOnDevice, copy, origin, nullptr});
  if (&queue != &other) {
    simulator.wait(other, simulator.record(queue, origin), origin);
  }
}

}  // namespace

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Simulator::get().check_usable();
  check_refused("aten::copy_", source);
  check_refused("aten::copy_", target);
  if (target.numel() == 0) {
    return target;
  }
  const at::Tensor from =
      source.sizes() == target.sizes() ? source : source.expand(target.sizes());
  if (is_on_device(from) && is_on_device(target)) {
    copy_on_device(from, target);
  } else if (is_on_device(from)) {
    copy_to_host(from, target, non_blocking);
  } else {
    copy_to_device(from, target, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) {
    target.resize_(source.sizes());
  }
  return copy_from(source, target, /*non_blocking=*/false);
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  auto& simulator = Simulator::get();
  auto view = kernel_view(tensor);
  Lock lock;
  simulator.synchronize(simulator.current_queue(tensor.device().index()));
  const KernelScope scope;
  return at::_local_scalar_dense(view);
}

}  // namespace simnpu
