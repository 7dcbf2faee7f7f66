"""A scheduler that gives users equal shares of each step."""
