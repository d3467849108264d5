// Operators that have a kernel of their own; all others take the fallback.
#pragma once

#include <c10/core/Storage.h>

namespace simnpu {

// Grows or shrinks a device storage; what is in it is copied in stream order.
void resize_storage(const c10::Storage& storage, size_t bytes);

void register_factories();

}  // namespace simnpu
