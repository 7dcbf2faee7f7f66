"""GGUF files: their headers in the words of a model directory, and their tensors.

A header is untrusted input: nothing is taken from it that the file does not hold.
"""

from headstock.weights.gguf.folder import find_gguf, unpack_gguf
from headstock.weights.gguf.index import INDEX, LINK, parse_index
from headstock.weights.gguf.tensor_file import GgufFile

__all__ = ["INDEX", "LINK", "GgufFile", "find_gguf", "parse_index", "unpack_gguf"]
