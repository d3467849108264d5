// When operations run. The order within a stream is given; the schedule chooses the rest.
#include <c10/util/Exception.h>

#include <algorithm>

#include "simulator.h"

namespace simnpu {

Queue& Simulator::queue(c10::DeviceIndex device, c10::StreamId stream) {
  auto& slot = queues_[{device, stream}];
  if (!slot) {
    slot = std::make_unique<Queue>();
    slot->device = device;
    slot->stream = stream;
  }
  return *slot;
}

Queue& Simulator::current_queue(c10::DeviceIndex device) {
  return queue(device, current_stream(device));
}

c10::StreamId Simulator::new_stream(c10::DeviceIndex device) {
  Lock lock;
  check_usable();
  queue(device, next_stream_);
  return next_stream_++;
}

void Simulator::enqueue(Queue& queue, Op op) {
  Lock lock;
  ++counts.enqueued;
  ++pending_;
  if (queue.ops.empty()) {
    ready_.push_back(&queue);
  }
  queue.ops.push_back(std::move(op));
  if (schedule_ == Schedule::kEager) {
    drain(queue);
  } else if (schedule_ == Schedule::kRandom) {
    while (random_() % 2 == 1 && step_random()) {
    }
  } else if (schedule_ == Schedule::kThread) {
    changed_.notify_all();
  }
}

void Simulator::pop_front(Queue& queue) {
  queue.ops.pop_front();
  --pending_;
  if (queue.ops.empty()) {
    ready_.erase(std::find(ready_.begin(), ready_.end(), &queue));
  }
}

void Simulator::run_front(Queue& queue) {
  if (auto mark = queue.ops.front().wait) {
    reach(*mark);
    pop_front(queue);
    return;
  }
  Op op = std::move(queue.ops.front());
  pop_front(queue);
  try {
    op.run();
  } catch (const c10::Error& error) {
    report(std::string("simnpu: ") + op.name + " failed: " + error.what_without_backtrace() +
           issued_at(op.origin));
  } catch (const std::exception& error) {
    report(std::string("simnpu: ") + op.name + " failed: " + error.what() + issued_at(op.origin));
  }
}

// This ends: only operations that were enqueued after a mark wait for it, so waits form no circle.
void Simulator::reach(const Mark& mark) {
  while (!mark.done && !mark.queue->ops.empty()) {
    run_front(*mark.queue);
  }
}

void Simulator::drain(Queue& queue) {
  while (!queue.ops.empty()) {
    run_front(queue);
  }
}

void Simulator::drain_device(c10::DeviceIndex device) {
  auto due = [&] {
    return std::find_if(ready_.begin(), ready_.end(),
                        [&](Queue* queue) { return queue->device == device; });
  };
  for (auto found = due(); found != ready_.end(); found = due()) {
    drain(**found);
  }
}

void Simulator::drain_all() {
  while (!ready_.empty()) {
    drain(*ready_.front());
  }
}

bool Simulator::step_random() {
  if (ready_.empty()) {
    return false;
  }
  run_front(*ready_[random_() % ready_.size()]);
  return true;
}

void Simulator::step(size_t count) {
  Lock lock;
  while (count-- > 0 && step_random()) {
  }
}

void Simulator::poll(Queue* queue) {
  if (schedule_ == Schedule::kRandom) {
    step_random();
  } else if (schedule_ == Schedule::kLazy && queue != nullptr && !queue->ops.empty()) {
    run_front(*queue);
  }
}

std::shared_ptr<Mark> Simulator::record(Queue& queue, Origin origin) {
  auto mark = std::make_shared<Mark>();
  mark->queue = &queue;
  auto reached = [mark] {
    mark->done = true;
    mark->time = std::chrono::steady_clock::now();
  };
  enqueue(queue, {"record event", reached, std::move(origin), nullptr});
  return mark;
}

void Simulator::wait(Queue& queue, std::shared_ptr<Mark> mark, Origin origin) {
  enqueue(queue, {"wait for event", nullptr, std::move(origin), std::move(mark)});
}

void Simulator::synchronize(Queue& queue) {
  Lock lock;
  check_usable();
  drain(queue);
  raise_violations();
}

void Simulator::synchronize_device(c10::DeviceIndex device) {
  Lock lock;
  check_usable();
  drain_device(device);
  raise_violations();
}

void Simulator::stop_worker() {
  std::thread worker;
  {
    Lock lock;
    stop_worker_ = true;
    changed_.notify_all();
    worker.swap(worker_);
  }
  if (worker.joinable()) {
    worker.join();
  }
}

void Simulator::start_worker() {
  stop_worker_ = false;
  if (schedule_ == Schedule::kThread && !forked_ && !worker_.joinable()) {
    worker_ = std::thread([this] { work(); });
  }
}

// The worker of the schedule `thread`: after a delay it runs one operation of a random stream.
void Simulator::work() {
  for (;;) {
    {
      // Not a `Lock`: the condition variable must be able to release it.
      std::unique_lock<std::recursive_mutex> lock(mutex_);
      changed_.wait(lock, [&] { return stop_worker_ || !ready_.empty(); });
      changed_.wait_for(lock, delay_, [&] { return stop_worker_; });
      if (stop_worker_) {
        return;
      }
    }
    Lock lock;
    step_random();
  }
}

void Simulator::set_schedule(const std::string& schedule, uint64_t seed, int delay_us) {
  static const std::map<std::string, Schedule> known = {{"lazy", Schedule::kLazy},
                                                        {"eager", Schedule::kEager},
                                                        {"random", Schedule::kRandom},
                                                        {"thread", Schedule::kThread}};
  auto found = known.find(schedule);
  TORCH_CHECK_VALUE(found != known.end(), "simnpu: schedule '", schedule,
                    "' isn't known; known are lazy, eager, random, thread");
  stop_worker();
  Lock lock;
  drain_all();
  random_.seed(seed);
  delay_ = std::chrono::microseconds(delay_us);
  schedule_ = found->second;
  start_worker();
}

}  // namespace simnpu
