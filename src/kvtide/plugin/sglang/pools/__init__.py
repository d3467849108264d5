"""SGLang's pools, described: from a pool's exact class to its tensors and their rows' rules.

describe          the table of all classes; `describe(subject)` gives a Description, or Refused
subject           Subject: a pool with all that belongs to it; Describer, NeverMoved
known_classes     the pool classes of the installed SGLang, and what becomes of each
kv_cache          what all pools have, by SGLang's base class: slots, pages, ranks' shares

keys_values       MHA and GQA, keys alone, MiniMax; keys_values_quantized: fp4, mxfp8, nvfp4
latent            MLA, with index keys (DSA)
sliding_window    layers with a window beside layers with full attention
recurrent_state   Mamba and the like beside attention
unified_memory    pools that share one buffer; page_table: where SGLang's tables say rows lie
ascend            the pools of NPUs
deepseek_v4       window, compressed caches and their states, on GPUs and NPUs

compressed_keys   what MiniCPM's attention keeps in the request pool, beside any of these
draft_model       a draft model's pools in the target's slots, beside any of these
"""
