"""Cache policies: rows that use one like core."""
