"""The cache policy `naive`: nothing is kept."""
