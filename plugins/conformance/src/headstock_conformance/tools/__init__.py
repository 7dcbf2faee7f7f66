"""Tool parsers: the events that they may return for an answer."""
