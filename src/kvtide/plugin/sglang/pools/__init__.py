"""SGLang's pools, described: from a pool's exact class to its tensors and their rows' rules."""
