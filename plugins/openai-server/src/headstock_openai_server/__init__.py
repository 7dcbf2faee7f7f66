"""The command `headstock serve`: an OpenAI-compatible server."""
