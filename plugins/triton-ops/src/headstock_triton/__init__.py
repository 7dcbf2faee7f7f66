"""Operations as fused Triton kernels, for headstock."""
