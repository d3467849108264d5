#pragma once

namespace simnpu {

// scaled_dot_product_attention by the CPU's own choice of kernels, so that its numbers are the
// CPU's, bit for bit. Without it torch would compute it step by step on a device of this kind.
void register_attention();

}  // namespace simnpu
