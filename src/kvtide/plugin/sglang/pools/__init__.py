"""Describes SGLang's pools: from a pool's exact class to its tensors and their row rules.

describe          the table of all classes; `describe(subject)` gives a Description, or Refused
subject           Subject: a pool with all that belongs to it; Describer, NeverMoved
known_classes     the pool classes of the installed SGLang, and what kvtide does with each
kv_cache          common to all pools, by SGLang's base class: slots, pages, ranks' shares

keys_values       MHA and GQA, keys alone, MiniMax; keys_values_quantized: fp4, mxfp8, nvfp4
latent            MLA, with index keys (DSA)
sliding_window    layers with a window beside layers with full attention
recurrent_state   Mamba and the like beside attention
unified_memory    pools that share a buffer; page_table: reads SGLang's tables of rows
ascend            the pools of NPUs
deepseek_v4       window, compressed caches and their states, on GPUs and NPUs

compressed_keys   compressed keys of MiniCPM's attention, in addition to any of these
draft_model       a draft model's pools in the target's slots, in addition to any of these
"""
