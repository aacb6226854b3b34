"""Optimizer steps on the CPU, over shards that a store keeps."""
