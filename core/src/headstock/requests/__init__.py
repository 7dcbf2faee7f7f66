"""From prompts to requests, and from the engine's updates to outputs."""
