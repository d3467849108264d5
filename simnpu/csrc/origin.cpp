#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "origin.h"

#include <unordered_map>

#include "simulator.h"

namespace simnpu {
namespace {

constexpr size_t kMostSites = 1 << 14;

struct Line {
  PyCodeObject* code;
  int number;
  bool operator==(const Line& other) const { return code == other.code && number == other.number; }
};

struct LineHash {
  size_t operator()(const Line& line) const {
    return std::hash<const void*>()(line.code) * 31 + static_cast<size_t>(line.number);
  }
};

// The lines seen so far, so that the text of each is made once. The code objects are held, since
// another could otherwise get the same address. All access is under the GIL.
struct Cache {
  std::vector<std::string> skipped;
  std::unordered_map<PyCodeObject*, bool> is_skipped;
  std::unordered_map<Line, Origin, LineHash> sites;
};

Cache& cache() {
  static auto* cache = new Cache;  // never destroyed: it holds Python objects
  return *cache;
}

void forget_if_full() {
  auto& seen = cache();
  if (seen.is_skipped.size() < kMostSites && seen.sites.size() < kMostSites) {
    return;
  }
  std::unordered_map<PyCodeObject*, bool> codes;
  codes.swap(seen.is_skipped);
  seen.sites.clear();
  for (auto& entry : codes) {
    Py_DECREF(entry.first);
  }
}

std::string utf8(PyObject* text) {
  const char* bytes = PyUnicode_AsUTF8(text);
  if (bytes == nullptr) {
    PyErr_Clear();
    return "?";
  }
  return bytes;
}

bool is_skipped(PyCodeObject* code) {
  auto& seen = cache();
  auto found = seen.is_skipped.find(code);
  if (found != seen.is_skipped.end()) {
    return found->second;
  }
  const std::string file = utf8(code->co_filename);
  bool skip = file.rfind("<frozen", 0) == 0;
  for (auto& directory : seen.skipped) {
    skip = skip || file.rfind(directory, 0) == 0;
  }
  Py_INCREF(code);
  seen.is_skipped.emplace(code, skip);
  return skip;
}

Origin site_of(PyFrameObject* frame, PyCodeObject* code) {
  const Line line{code, PyFrame_GetLineNumber(frame)};
  auto& site = cache().sites[line];
  if (!site) {
#if PY_VERSION_HEX >= 0x030B0000
    PyObject* name = code->co_qualname;
#else
    PyObject* name = code->co_name;
#endif
    site = std::make_shared<Site>(Site{utf8(code->co_filename) + ":" +
                                       std::to_string(line.number) + " in " + utf8(name)});
  }
  return site;
}

Origin innermost_line() {
  forget_if_full();
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  Origin found;
  while (frame != nullptr && !found) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!is_skipped(code)) {
      found = site_of(frame, code);
    }
    Py_DECREF(code);
    PyFrameObject* outer = found ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  return found;
}

}  // namespace

Origin this_line() {
  // A thread that Python doesn't know has no frame, and registering it would take time.
  if (Lock::held_here() || Simulator::get().stopped() || !Py_IsInitialized() ||
      PyGILState_GetThisThreadState() == nullptr) {
    return nullptr;
  }
  const PyGILState_STATE state = PyGILState_Ensure();
  Origin found = innermost_line();
  PyGILState_Release(state);
  return found;
}

std::string issued_at(const Origin& origin) {
  return "\n  issued at " + (origin ? origin->text : "a thread that runs no Python (autograd's?)");
}

void skip_directories(std::vector<std::string> directories) {
  cache().skipped = std::move(directories);
}

}  // namespace simnpu
