"""Cache policies: rows that use one as core does."""
