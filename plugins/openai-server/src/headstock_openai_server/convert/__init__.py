"""From the fields of a body to the engine's terms, and back."""
