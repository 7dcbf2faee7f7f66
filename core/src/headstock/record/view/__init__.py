"""Recordings drawn: a trace, and a page for a browser. What they show is computed here and only
drawn there.
"""
