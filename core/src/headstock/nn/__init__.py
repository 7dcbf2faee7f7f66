"""Pure functions over tensors, shared by models and operations. Those whose names end in `_` write in place."""
