"""Sets of operations: small models, and what torch's operations make of them."""
