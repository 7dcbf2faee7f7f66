"""The attention backend `trtllm`: TensorRT-LLM's kernels over pages, for Hopper and Blackwell."""
