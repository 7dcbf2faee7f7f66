"""How long tests wait for what comes at once on an engine that is whole."""

seconds = 600.0
"""It ends what hangs, on however busy a machine. Sessions with a broken engine make it short."""
