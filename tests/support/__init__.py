"""Helpers of the core's tests: a device that runs late, and pools with known bytes."""
