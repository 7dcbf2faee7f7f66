"""Check Python, torch and CUDA, and the compilers of kernels that are built at first use."""

from __future__ import annotations

import platform
import shutil
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata

from headstock.doctor.finding import Finding, fail_finding, pass_finding, warn_finding
from headstock.errors import format_count

_LEAST_PYTHON = (3, 11)
_GET_CUDA = "for an NVIDIA GPU install a CUDA build of torch: see pytorch.org/get-started"
_TOOLS = {
    "nvcc": "install the CUDA toolkit, or leave it: only kernels compiled at first use need it",
    "ninja": "pip install ninja, or leave it: only kernels compiled at first use need it",
}


def check_python() -> Iterator[Finding]:
    """Check the versions of the interpreter and of headstock."""
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < _LEAST_PYTHON:
        yield fail_finding(
            "python", text, f"headstock needs Python {_LEAST_PYTHON[0]}.{_LEAST_PYTHON[1]} or later"
        )
    else:
        yield pass_finding("python", text)
    try:
        yield pass_finding("headstock", metadata.version("headstock"))
    except metadata.PackageNotFoundError:
        hint = "install it (in a checkout: pip install ./core), so that its own plugins are found"
        yield fail_finding("headstock", "runs from source but is not installed", hint)


def check_torch() -> Iterator[Finding]:
    """Check that torch can be imported, and that it and the machine agree about CUDA."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield fail_finding("torch", f"cannot be imported: {error}", "pip install torch")
        return
    yield pass_finding(
        "torch", f"{torch.__version__}, {format_count(torch.get_num_threads(), 'thread')}"
    )
    # torch says only in a warning why it cannot use a GPU, such as that the driver is too old.
    with warnings.catch_warnings(record=True) as driver_warnings:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if torch.version.cuda is None:
        yield warn_finding("cuda", "torch is a CPU build", _GET_CUDA)
    elif not available:
        reason = f": {' '.join(str(driver_warnings[0].message).split())}" if driver_warnings else ""
        hint = f"compare the driver (nvidia-smi) with CUDA {torch.version.cuda}"
        yield warn_finding(
            "cuda",
            f"torch is built for CUDA {torch.version.cuda} but finds no usable GPU{reason}",
            hint,
        )
    else:
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            free, total = torch.cuda.mem_get_info(index)
            memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
            name = torch.cuda.get_device_name(index)
            yield pass_finding(
                f"cuda:{index}", f"{name}, sm_{major}{minor}, {memory}, CUDA {torch.version.cuda}"
            )


def check_tools() -> Iterator[Finding]:
    """Check that the compilers which some kernel libraries call at first use can be found."""
    for name, hint in _TOOLS.items():
        if shutil.which(name):
            yield pass_finding(name, "found")
        else:
            yield warn_finding(name, "not found", hint)
