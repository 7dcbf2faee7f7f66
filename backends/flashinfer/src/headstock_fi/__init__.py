"""The attention backend `fi`: FlashInfer over pages, for CUDA."""
