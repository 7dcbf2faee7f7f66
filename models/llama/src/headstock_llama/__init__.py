"""Llama and Mistral models for headstock."""
