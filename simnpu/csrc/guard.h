// torch's two ways of asking a device about devices, streams and events.
#pragma once

namespace simnpu {

void register_guard();
void register_hooks();

}  // namespace simnpu
