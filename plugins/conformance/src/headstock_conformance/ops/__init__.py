"""Sets of operations: small models, compared with torch's operations."""
