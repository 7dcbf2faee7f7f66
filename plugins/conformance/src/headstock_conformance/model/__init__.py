"""Model families: small checkpoints, and what transformers makes of them."""
