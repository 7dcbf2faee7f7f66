"""From prompts to requests, and from what the engine says of them to text."""
