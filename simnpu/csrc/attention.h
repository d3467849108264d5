#pragma once

namespace simnpu {

// Runs scaled_dot_product_attention with the kernel that the CPU chooses, so that the numbers are
// the CPU's to the bit. Otherwise torch would compute it step by step on a device of this kind.
void register_attention();

}  // namespace simnpu
