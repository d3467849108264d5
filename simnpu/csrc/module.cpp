// The Python module `simnpu._C`. Importing it does nothing; `install` registers the device.
#define PY_SSIZE_T_CLEAN
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "factories.h"
#include "fallback.h"
#include "guard.h"
#include "refusals.h"
#include "simulator.h"

namespace py = pybind11;

namespace simnpu {
namespace {

// No thread waits for the simulator's lock while it holds the GIL, so that other threads go on.
using WithoutGil = py::call_guard<py::gil_scoped_release>;

void install(int devices, size_t memory_bytes) {
  Simulator::get().configure(devices, memory_bytes);
  register_device_allocator();
  register_host_allocator();
  register_guard();
  register_hooks();
  register_factories();
  register_fallback();
}

void set_policy(bool pageable_async, bool strict_free, std::optional<size_t> pinned_limit_bytes) {
  Lock lock;
  Simulator::get().policy = {pageable_async, strict_free, pinned_limit_bytes.value_or(SIZE_MAX)};
}

py::dict stats() {
  auto& simulator = Simulator::get();
  Counts counts;
  std::vector<size_t> used, peak;
  {
    py::gil_scoped_release no_gil;
    Lock lock;
    counts = simulator.counts;
    for (int i = 0; i < simulator.device_count(); ++i) {
      const auto& arena = simulator.arena(static_cast<c10::DeviceIndex>(i));
      used.push_back(arena.used);
      peak.push_back(arena.peak);
    }
  }
  py::dict result;
  result["enqueued"] = counts.enqueued;
  result["queued_kernels"] = counts.queued_kernels;
  result["blocking_kernels"] = counts.blocking_kernels;
  result["blocking_names"] = counts.blocking_names;
  result["device_bytes"] = py::tuple(py::cast(used));
  result["device_peak_bytes"] = py::tuple(py::cast(peak));
  result["pinned_bytes"] = simulator.host.pinned_bytes();
  return result;
}

size_t pending() {
  Lock lock;
  return Simulator::get().pending();
}

std::vector<std::string> take_violations() {
  Lock lock;
  return Simulator::get().take_violations();
}

// Messages without the C++ stack at the end of c10::Error::what().
void translate(std::exception_ptr error) {
  try {
    if (error) {
      std::rethrow_exception(error);
    }
  } catch (const c10::ValueError& caught) {
    PyErr_SetString(PyExc_ValueError, caught.what_without_backtrace());
  } catch (const c10::Error& caught) {
    PyErr_SetString(PyExc_RuntimeError, caught.what_without_backtrace());
  }
}

}  // namespace
}  // namespace simnpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simnpu;
  py::register_local_exception_translator(&translate);
  module.def("install", &install);
  module.def("skip_directories", &skip_directories);
  module.def("set_refusals", &set_refusals);
  module.def("set_schedule", [](const std::string& schedule, uint64_t seed, int delay_us) {
    Simulator::get().set_schedule(schedule, seed, delay_us);
  }, WithoutGil());
  module.def("set_policy", &set_policy, WithoutGil());
  module.def("pending", &pending, WithoutGil());
  module.def("step", [](size_t count) { Simulator::get().step(count); }, WithoutGil());
  module.def("take_violations", &take_violations, WithoutGil());
  module.def("stats", &stats);
  module.def("reset", [] { Simulator::get().reset(); }, WithoutGil());
  module.def("shutdown", [] { Simulator::get().shutdown(); }, WithoutGil());
  module.def("before_fork", [] {
    {
      py::gil_scoped_release no_gil;
      Simulator::get().stop_worker();
    }
    Simulator::get().before_fork();
  });
  module.def("after_fork", [](bool is_child) { Simulator::get().after_fork(is_child); });
  module.def("is_forked", [] { return Simulator::get().forked(); });
  module.def("device_count", [] { return Simulator::get().device_count(); });
  module.def("current_device", [] { return static_cast<int>(current_device()); });
  module.def("set_device", [](int device) {
    set_current_device(static_cast<c10::DeviceIndex>(device));
  });
}
