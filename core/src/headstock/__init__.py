"""headstock: an LLM inference engine whose parts are plugins."""
