// The kernel of every operator that has none of its own: the CPU's, run on the device's memory.
#pragma once

namespace simnpu {

void register_fallback();

}  // namespace simnpu
