"""HTTP: bodies, event streams, middleware, the page."""
