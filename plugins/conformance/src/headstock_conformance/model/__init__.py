"""Model families: small checkpoints, compared with transformers."""
