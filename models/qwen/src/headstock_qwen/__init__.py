"""Qwen2, Qwen3 and Qwen3-MoE models for headstock."""
