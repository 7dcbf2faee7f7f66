from __future__ import annotations

from quick_interpreter import quick_interpreter

__all__ = ["quick_interpreter"]
