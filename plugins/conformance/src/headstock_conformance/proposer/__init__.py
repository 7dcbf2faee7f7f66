"""Proposers: the rules of their drafts."""
