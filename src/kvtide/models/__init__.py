"""Reads a model's configuration: its cache layout, its bytes per token, its attention. Pure."""
