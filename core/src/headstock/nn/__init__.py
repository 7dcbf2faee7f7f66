"""Pure functions over tensors that models and operations share. A name that ends in `_` writes to what its docstring names."""
