"""The engine: requests in, updates out, and the loop that drives it."""
