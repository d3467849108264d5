"""How fast KV moves here, always beside something that is measured in turns with it."""
