// The kernel of every operator without its own kernel: the CPU's, run on the device's memory.
#pragma once

namespace simnpu {

void register_fallback();

}  // namespace simnpu
