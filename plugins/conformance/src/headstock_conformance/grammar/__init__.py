"""Grammar engines: which tokens they may allow."""
