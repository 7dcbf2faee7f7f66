"""Names for the arrays of the contract. Importing it does not import numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Ints = np.ndarray
    """Integers; the docstring that names the array gives its shape and width."""
else:  # numpy takes a fifth of the time in which `headstock plugins list` answers
    Ints = Any
