"""The application and the answer of every path."""
