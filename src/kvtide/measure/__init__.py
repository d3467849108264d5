"""Measures how fast KV moves on this machine, in turns with a copy to compare it with."""
