"""The attention backend `fa`: FlashAttention over pages, for CUDA."""
