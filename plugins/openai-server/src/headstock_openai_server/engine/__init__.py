"""The engine process, the connection to it, and the requests of each client."""
