"""The runner `cudagraph`: decode steps replayed as CUDA graphs."""
