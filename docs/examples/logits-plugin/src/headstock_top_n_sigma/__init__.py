"""The logits processor `top-n-sigma`."""
