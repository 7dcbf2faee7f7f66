"""Measuring speed: the work, the contestants, and figures with all that they depend on. Imports no
torch by itself.
"""
