"""Proposers: what they may answer."""
