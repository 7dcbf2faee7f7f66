"""Schedulers: a toy model whose tokens show every mistake, and invariants of each step."""
