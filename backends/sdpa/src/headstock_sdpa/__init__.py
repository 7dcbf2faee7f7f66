"""The attention backend `sdpa`: plain torch, for any device."""
