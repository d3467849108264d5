"""The reference engine: continuous batching on transformers models over a kvtide pool."""
