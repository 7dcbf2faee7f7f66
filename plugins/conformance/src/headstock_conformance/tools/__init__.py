"""Tool parsers: what they may make of an answer."""
