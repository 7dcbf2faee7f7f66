"""What a process compiles, later ones find: a kernel's key on disk does not depend on which others
were launched before it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

KEYS = """
import importlib, json, pkgutil, sys
from triton.runtime.jit import JITFunction

name, is_reversed = sys.argv[1], sys.argv[2] == "reversed"
package = importlib.import_module(name)
found = pkgutil.walk_packages(package.__path__, name + ".")
modules = [importlib.import_module(module.name) for module in found]
kernels = {
    f"{kernel.__module__}.{kernel.__name__}": kernel
    for module in modules
    for kernel in vars(module).values()
    if isinstance(kernel, JITFunction) and kernel.__name__.endswith("_kernel")
}
print(json.dumps({name: kernels[name].cache_key for name in sorted(kernels, reverse=is_reversed)}))
"""


def list_keys(package: str, order: str) -> dict[str, str]:
    """The cache key of each kernel of a package, asked for in that order by a new process."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", KEYS, package, order]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    keys: dict[str, str] = json.loads(done.stdout)
    return keys


@pytest.mark.parametrize("package", ["headstock_triton", "headstock_fa"])
def test_a_kernels_key_does_not_depend_on_those_before_it(package: str) -> None:
    keys = list_keys(package, "sorted")
    assert len(keys) > 1
    assert list_keys(package, "reversed") == keys
