"""Pure functions over tensors, shared by models and operations, and records that attention backends
share.

Functions whose names end in `_` write in place.
"""
