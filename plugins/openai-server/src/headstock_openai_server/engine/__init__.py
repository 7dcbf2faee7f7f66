"""The engine process, the connection to it, and what runs on it for which client."""
