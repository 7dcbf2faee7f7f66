"""Recordings drawn: a page for a browser, and a trace.

What they show is computed here and only drawn there.
"""
