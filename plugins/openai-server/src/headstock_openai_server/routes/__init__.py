"""The application and its routes."""
