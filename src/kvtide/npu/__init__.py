"""SGLang's pools and allocators for Ascend NPUs, with SGLang's names and signatures, over kvtide.

    pool = NPUMHATokenToKVPool(size=…, page_size=128, dtype=torch.bfloat16, …, device="npu")
    copy = pool.get_cpu_copy(slots)            # copy[layer][chunk] -> [k, v], on the host
    pool.load_cpu_copy(copy, other_slots)      # the same bytes, or an error
    copy.release()

They run on any device that kvtide can open.
"""

from kvtide.npu.allocator import NPUPagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from kvtide.npu.base import NPUTokenToKVPool
from kvtide.npu.copy import CPUCopy
from kvtide.npu.mha import NPUMHATokenToKVPool
from kvtide.npu.mla import NPUMLATokenToKVPool

__all__ = [
    "CPUCopy",
    "NPUMHATokenToKVPool",
    "NPUMLATokenToKVPool",
    "NPUPagedTokenToKVPoolAllocator",
    "NPUTokenToKVPool",
    "TokenToKVPoolAllocator",
]
