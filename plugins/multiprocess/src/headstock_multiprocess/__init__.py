"""Tensor parallelism: rank 0 has the engine, and the other ranks run its plans in processes."""
