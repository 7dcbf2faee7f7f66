"""An attention backend for headstock that computes one row after another."""
