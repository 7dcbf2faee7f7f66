"""Schedulers: a toy model whose tokens show every mistake, and what must hold after each step."""
