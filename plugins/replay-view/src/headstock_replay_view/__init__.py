"""Draw recordings as a page for a browser or as a trace.

Everything shown is computed here; viewers only draw it.
"""
