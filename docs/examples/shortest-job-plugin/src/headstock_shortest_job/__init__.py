"""A scheduler that runs what has the least work left."""
