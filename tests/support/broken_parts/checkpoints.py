"""Directories of checkpoints that are none."""

from __future__ import annotations

MISSING = "/no/such/folder"
NUMBER = 5
