// The line of Python that issued an operation.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace simnpu {

struct Site {
  std::string text;  // "path/file.py:12 in function"
};

using Origin = std::shared_ptr<const Site>;

// The innermost Python line of this thread outside torch and simnpu; null if there is none
// (autograd's threads) or Python is ending. It takes the GIL, so it returns null under the
// simulator's lock.
Origin this_line();

// " issued at file.py:12 in function", for the end of a message.
std::string issued_at(const Origin& origin);

// Skips frames of files below these directories. Called once, with the GIL.
void skip_directories(std::vector<std::string> directories);

}  // namespace simnpu
