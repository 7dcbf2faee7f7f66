"""A cache policy for headstock that evicts what is used least often."""
