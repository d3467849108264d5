"""SGLang's package: where it defines the classes that kvtide knows, and its tested versions."""

from __future__ import annotations

from collections.abc import Mapping

from kvtide.plugin.package import EnginePackage

HOMES: Mapping[str, tuple[str, ...]] = {
    "mem_cache.memory_pool": (
        *("MHATokenToKVPool", "MHATokenToKVPoolFP4", "MHATokenToKVPoolMXFP8"),
        *("MHATokenToKOnlyPool", "MiniMaxSparseKVPool", "NoOpMHATokenToKVPool"),
        *("PageMajorMHATokenToKVPool", "MLATokenToKVPool", "MLATokenToKVPoolFP4"),
        *("DSATokenToKVPool", "HybridLinearKVPool", "MambaPool", "KVCache"),
        *("ReqToTokenPool", "HybridReqToTokenPool"),
    ),
    "mem_cache.minimax_m3_nvfp4_pool": (
        *("MiniMaxM3Nvfp4MainKVPool", "MiniMaxM3Nvfp4IndexKPool", "MiniMaxM3Nvfp4KVPool"),
    ),
    "mem_cache.page_interleave_pool": (
        *("PageInterleaveMHATokenToKVPool", "PageInterleaveMLATokenToKVPool"),
        "PageInterleaveDSATokenToKVPool",
    ),
    "mem_cache.hisparse_memory_pool": ("HiSparseMHAMainPool", "HiSparseDSATokenToKVPool"),
    "mem_cache.dsa_cache_layer_split": ("LayerSplitDSATokenToKVPool",),
    "mem_cache.swa_memory_pool": ("SWAKVPool",),
    "mem_cache.base_swa_memory_pool": ("BaseSWAKVPool",),
    "mem_cache.qsa_kv_pool": ("QSATokenToKVPool",),
    "mem_cache.ple_state_pool": ("ShortConvPool", "NGramPool", "SlotIndexedState"),
    "mem_cache.unified_memory_pool": (
        *("UnifiedMHATokenToKVPool", "UnifiedMLATokenToKVPool", "UnifiedHybridLinearKVPool"),
        *("UnifiedSWAKVPool", "UnifiedMambaPool", "UnifiedMambaSlotAllocator"),
        "UnifiedHybridReqToTokenPool",
    ),
    "mem_cache.unified_draft_pool": (
        *("UnifiedDraftKVPool", "UnifiedDraftSWAKVPool", "UnifiedDraftMambaPool"),
    ),
    "mem_cache.allocator.token": ("TokenToKVPoolAllocator",),
    "mem_cache.allocator.paged": ("PagedTokenToKVPoolAllocator",),
    "mem_cache.allocator.swa": ("SWATokenToKVPoolAllocator",),
    "mem_cache.allocator.unified_mamba": ("UnifiedMambaTokenToKVPoolAllocator",),
    "mem_cache.allocator.unified_hybrid_swa": ("UnifiedMambaSWATokenToKVPoolAllocator",),
    "mem_cache.deepseek_v4_memory_pool": (
        *("DeepSeekV4TokenToKVPool", "DeepSeekV4SingleKVPool", "DeepSeekV4UniformFP8KVPool"),
        *("DeepSeekV4IndexerPool", "DeepSeekV4UnifiedKVPool", "HiSparseC4DevicePool"),
    ),
    "mem_cache.deepseek_v4_compress_state": ("CompressStatePool",),
    "mem_cache.radix_cache": ("RadixCache",),
    "mem_cache.unified_radix_cache": ("UnifiedRadixCache",),
    "hardware_backend.npu.allocator_npu": ("NPUPagedTokenToKVPoolAllocator",),
    "hardware_backend.npu.memory_pool_npu": (
        *("NPUMHATokenToKVPool", "NPUMHATokenToKOnlyPool", "NPUMiniMaxSparseKVPool"),
        "NPUMLATokenToKVPool",
    ),
    "hardware_backend.npu.dsv4.dsv4_memory_pool": (
        *("DSV4NPUTokenToKVPool", "NPUDeepSeekV4SingleKVPool", "NPUDeepSeekV4IndexerPool"),
        "NPUCompressStatePool",
    ),
    "hardware_backend.mlx.model_runner_stub": ("_DummyKVCache",),
    "layers.attention.minicpm.cache": ("MiniCPMCompressedCache",),
}
"""The names of classes by their modules below `sglang.srt`; each name occurs once."""

SGLANG = EnginePackage(
    "SGLang",
    "sglang",
    "srt",
    HOMES,
    # SGLang assembles these two classes from the fields in these files.
    assembled={
        "ServerArgs": "arg_groups/fields/",
        "ParallelContext": "arg_groups/fields/parallel.py",
    },
    tested=("0.5.23",),
)
"""SGLang's package, and the versions with which kvtide was tested."""

name_of = SGLANG.name_of
"""The name of an object's class, the bare name if kvtide knows the class: see EnginePackage."""
