// torch's two interfaces to a device's devices, streams and events.
#pragma once

namespace simnpu {

void register_guard();
void register_hooks();

}  // namespace simnpu
