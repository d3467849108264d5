// Operators that have their own kernel; all others use the fallback.
#pragma once

#include <c10/core/Storage.h>

namespace simnpu {

// Grows or shrinks a device storage; its content is copied in stream order.
void resize_storage(const c10::Storage& storage, size_t bytes);

void register_factories();

}  // namespace simnpu
