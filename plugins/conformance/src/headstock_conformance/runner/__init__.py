"""Checks of runners."""
