"""Ranks of headstock as Ray actors."""
