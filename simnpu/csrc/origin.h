// Which line of Python issued an operation.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace simnpu {

struct Site {
  std::string text;  // "path/file.py:12 in function"
};

using Origin = std::shared_ptr<const Site>;

// The innermost Python line of this thread that lies outside torch and simnpu; null where there
// is none (autograd's threads) or Python is going away. Takes the GIL, so that it must not be
// called under the simulator's lock; there it gives null.
Origin this_line();

// " issued at file.py:12 in function", for the end of a message.
std::string issued_at(const Origin& origin);

// Frames of files below these directories are passed over. Called once, with the GIL.
void skip_directories(std::vector<std::string> directories);

}  // namespace simnpu
