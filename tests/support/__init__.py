"""What the core's tests share: a device that can be stepped, and pools with known bytes."""
