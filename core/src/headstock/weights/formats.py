"""Recognize by file names the formats that are not served, and name what converts each."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from headstock.errors import shorten

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
GGUF = "*.gguf"
_GGUF_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_WEIGHTS = "pytorch_model*.bin"
"""The pickles that transformers reads: a checkpoint in Hugging Face layout, before safetensors."""

_ADAPTER = "adapter_config.json"

INSIDE = ("*", "snapshots/*", "models--*/snapshots/*")
"""Where models lie in a folder that was given instead of one: a collection, or a cache of the hub.
"""

LFS_POINTER = b"version https://git-lfs"
"""How the file begins that Git leaves instead of a large one until LFS fetches that."""

_TRANSFORMERS = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T"
# The tokenizer is saved too: a converted directory is to be complete.
_CONVERT_PICKLE = (
    f"import sys; {_TRANSFORMERS}; "
    "[c.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2]) for c in (M, T)]"
)
# not every transformers 5 has GgufConfig, and those without it convert by themselves
_CONVERT_GGUF = (
    "import sys, transformers as t; d, f, o = sys.argv[1:]; G = getattr(t, 'GgufConfig', None); "
    "k = {'quantization_config': G(dequantize=True)} if G else {}; "
    "t.AutoModelForCausalLM.from_pretrained(d, gguf_file=f, **k).save_pretrained(o); "
    "t.AutoTokenizer.from_pretrained(d, gguf_file=f).save_pretrained(o)"
)
_MERGE_ADAPTER = (
    "import sys; from peft import AutoPeftModelForCausalLM as M; from transformers import "
    "AutoTokenizer as T; d, b, o = sys.argv[1:]; "
    "M.from_pretrained(d).merge_and_unload().save_pretrained(o); "
    "T.from_pretrained(b).save_pretrained(o)"
)


def explain_file(path: Path) -> str:
    """Explain what a file is that was given instead of a model directory."""
    directory = path.parent
    if any(path.match(pattern) for pattern in _PICKLES) and not any(
        directory.glob("*.safetensors")
    ):
        return _explain_pickles(directory, [path.name])
    if (directory / "config.json").is_file():
        return (
            f"{shorten(path)} is one file of a model; set model (--model) to its directory: "
            f"{_quote_argument(directory)}"
        )
    return (
        f"{shorten(path)} is a file; set model (--model) to the directory that holds "
        "config.json, a tokenizer and .safetensors"
    )


def explain_directory(directory: Path) -> str:
    """Explain why a directory cannot be served as a model; empty if its file names do not say."""
    # First of all: an adapter's folder has .safetensors too, but they are not a model.
    if (directory / _ADAPTER).is_file():
        return _explain_adapter(directory)
    gguf = sorted(directory.glob(GGUF))
    if gguf:
        return _name_gguf(gguf[0])
    pickles = _list_pickles(directory)
    if pickles:
        return _explain_pickles(directory, pickles)
    inside = sorted(
        path.parent for pattern in INSIDE for path in directory.glob(f"{pattern}/config.json")
    )
    if inside and not (directory / "config.json").exists():
        return (
            f"{shorten(directory)} is not a model directory, but {inside[0].name} in it is; set "
            f"model (--model) to {_quote_argument(inside[0])}"
        )
    if not any(directory.iterdir()):
        return (
            f"{shorten(directory)} is empty; give the directory that holds config.json, a "
            "tokenizer and .safetensors"
        )
    return ""


def _explain_adapter(directory: Path) -> str:
    """Explain how to merge an adapter, which is not a model by itself."""
    base = _find_adapter_base(directory)
    command = _python_command(_MERGE_ADAPTER, directory, base, _conversion_directory(directory))
    return (
        f"{shorten(directory)} holds an adapter of {shorten(base)}, and adapters are not "
        f"supported; merge it into that model: pip install peft && {command}"
    )


def find_gguf_shard(path: Path) -> str:
    """Find which part of a model a GGUF file is, by its name; empty for a whole one."""
    found = _GGUF_SHARD.search(path.name)
    return "" if found is None else f"{int(found[1])} of {int(found[2])}"


def explain_gguf(path: Path, reason: str) -> str:
    """Explain why a GGUF file is not read, and how to convert it."""
    command = _python_command(_CONVERT_GGUF, path.parent, path.name, _conversion_directory(path))
    return (
        f"{shorten(path.name)}: {reason}; use the model that it was made from, or convert it: "
        f"pip install gguf accelerate && {command}"
    )


def _name_gguf(path: Path) -> str:
    """Explain that a GGUF file is a model by itself."""
    return (
        f"{shorten(path.parent)} has a model in the GGUF format; set model (--model) to its file: "
        f"{_quote_argument(path)}"
    )


def _explain_pickles(directory: Path, names: list[str]) -> str:
    """Explain how to convert a directory whose weights are pickles."""
    problem = f"{directory} has weights only as pickles ({shorten(names[0])}), which can run code"
    if (directory / "config.json").is_file() and any(Path(name).match(_WEIGHTS) for name in names):
        return (
            f"{problem}; if you trust them, convert them: "
            f"{_python_command(_CONVERT_PICKLE, directory, _conversion_directory(directory))}"
        )
    return (
        f"{problem}; get the model as a directory with config.json and .safetensors, as most on "
        "the hub are"
    )


def _list_pickles(directory: Path) -> list[str]:
    """List the pickles of a directory, sorted; none when it has .safetensors."""
    # Many repositories hold both forms of one checkpoint, and then .safetensors are read.
    if any(directory.glob("*.safetensors")):
        return []
    return sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))


def _find_adapter_base(directory: Path) -> str:
    """Find the model that an adapter was made for; BASE when its file does not say."""
    try:
        name = json.loads((directory / _ADAPTER).read_text(encoding="utf-8"))[
            "base_model_name_or_path"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        name = None
    return name if isinstance(name, str) and name else "BASE"


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is what Git leaves instead of a large one until LFS fetches that."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def _conversion_directory(path: Path) -> str:
    """The directory for a conversion of `path`: a new name in the working directory."""
    stem = path.stem if path.suffix in (".gguf", ".bin") else path.name
    return f"./{stem or 'model'}-safetensors"


def _python_command(program: str, *arguments: object) -> str:
    """The shell command that runs a program of one line."""
    # The programs have neither double quotes nor `$`; paths are arguments, each quoted for itself.
    return f'python -c "{program}" {" ".join(map(_quote_argument, arguments))}'


def _quote_argument(argument: object) -> str:
    """An argument as a shell reads it."""
    return shlex.quote(str(argument))
