"""What a process compiles, later ones find: a kernel's key on disk does not depend on which others
were launched before it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from often import often

KEYS = """
import importlib, json, pkgutil, sys
from triton.runtime.jit import JITFunction

name, order = sys.argv[1:]
package = importlib.import_module(name)
found = pkgutil.walk_packages(package.__path__, name + ".")
modules = [importlib.import_module(module.name) for module in found]
functions = {
    f"{function.__module__}.{function.__name__}": function
    for module in modules
    for function in vars(module).values()
    if isinstance(function, JITFunction)
}
imported = {name: function.hash for name, function in functions.items() if function.hash}
if order == "imported":
    print(json.dumps(imported))
    sys.exit()
if order == "again":
    for _ in range(9):  # each time one more call deep
        for function in functions.values():
            function.hash, function.used_global_vals = None, {}
            function.cache_key
    print(json.dumps({name: functions[name].hash for name in imported}))
    sys.exit()
kernels = [name for name in sorted(functions) if name.endswith("_kernel")]
chosen = reversed(kernels) if order == "reversed" else kernels
print(json.dumps({name: functions[name].cache_key for name in chosen}))
"""


def list_keys(package: str, order: str) -> dict[str, str]:
    """The cache keys of a package in a new process.

    order: "sorted" or "reversed", in which those of kernels are asked for; "imported": those that
        are known after an import; "again": the same, computed after it
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", KEYS, package, order]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    keys: dict[str, str] = json.loads(done.stdout)
    return keys


@pytest.mark.parametrize("package", often(1, ["headstock_triton", "headstock_fa"]))
def test_a_kernels_key_does_not_depend_on_those_before_it(package: str) -> None:
    keys = list_keys(package, "sorted")
    assert len(keys) > 1
    assert list_keys(package, "reversed") == keys


@pytest.mark.full
def test_keys_have_all_that_a_function_calls() -> None:
    keys = list_keys("headstock_triton", "imported")
    assert len(keys) > 40
    assert list_keys("headstock_triton", "again") == keys
