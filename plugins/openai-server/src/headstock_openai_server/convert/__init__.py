"""Convert bodies to the engine's types, and back."""
