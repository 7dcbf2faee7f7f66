"""Grammar engines: what they may allow."""
