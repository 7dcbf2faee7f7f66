"""FlexAttention of torch as an attention backend for headstock."""
