"""From a configuration to an engine's parts: choose, check, negotiate, size, assemble."""
