"""Pack vLLM for a bare x86-64 host with a Hopper, CUDA 13, Python 3.12 and torch 2.11.

    python tests/gpu/pack_vllm.py .vllm       .vllm/vllm.tar.xz.00, .01, ... of 30 MB each

There: cat vllm.tar.xz.* | tar -xJ, whose folder `site` is what `gpu.turns --vllm` takes. It is
vLLM 0.26.0, the last for torch 2.11, without what a model of text on Hopper does not load: code for
other GPUs, and the kernels that are compiled by CuTe DSL. Set there
VLLM_USE_FLASHINFER_SAMPLER=0, VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0 and
CUDA_CACHE_MAXSIZE=4294967296, and for Qwen3.5 give `"gdn_prefill_backend": "triton"`.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from pack import download

VLLM = "vllm==0.26.0"
NEEDED = """
anthropic apache-tvm-ffi==0.1.15.post2 astor blake3 cachetools cbor2 compressed-tensors==0.17.0
depyf==0.20.0 dill diskcache==5.6.3 distro dnspython docstring-parser email-validator fastapi-cli
fastapi==0.136.3 fastar fastsafetensors==0.5.0 flashinfer-python==0.6.14 googleapis-common-protos
httpcore2 httptools httpx-sse httpx2 ijson interegular jiter jmespath jsonschema
jsonschema-specifications lark==1.2.2 llguidance==1.7.6 lm-format-enforcer==0.11.3 loguru mcp
mistral-common==1.13.1 model-hosting-container-standards msgspec nvtx==0.2.15 openai
openai-harmony==0.0.8 opentelemetry-api opentelemetry-exporter-otlp
opentelemetry-exporter-otlp-common==0.66b1 opentelemetry-exporter-otlp-proto-common
opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http opentelemetry-proto
opentelemetry-sdk opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai
outlines-core==0.2.14 partial-json-parser prometheus-fastapi-instrumentator prompt-toolkit
pybase64 pycountry pydantic-core==2.50.4 pydantic-extra-types pydantic-settings pydantic==2.14.3
pyjwt python-dotenv python-json-logger python-multipart pyzmq referencing rich-toolkit rignore
rpds-py setproctitle sniffio sse-starlette starlette==1.10.0 supervisor torch-c-dlpack-ext
truststore uvicorn watchfiles wcwidth websockets xgrammar==0.2.8
""".split()
"""What it imports and such a host lacks, with versions where others do not fit."""
LEFT_OUT = (
    "*/_vllm_fa2_C*",
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/include/*",
    "vllm/third_party/deep_gemm/_C.cpython-31[0134]*",
    "vllm/third_party/fmha_sm100/*",
    "mistral_common/data/*",
    "pycountry/locales/*",
    "*/swagger-ui*",
)
FATBIN, HOPPER = b"\x50\xed\x55\xba", 90
PTX, BINARY = 1, 2
PART_BYTES = 30 << 20


def unpack(wheel: Path, site: Path) -> None:
    """Unzip what is not left out."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not any(fnmatch(name, pattern) for pattern in LEFT_OUT):
                archive.extract(name, site)


def strip_library(path: Path) -> None:
    """Write 0 over the code for other GPUs, which then takes no room in an archive.

    PTX stays where a kernel has no binary for Hopper.
    """
    data = bytearray(path.read_bytes())
    at = data.find(FATBIN)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        if (version, header) == (1, 16) and at + header + size <= len(data):
            _strip_bundle(data, at + header, at + header + size)
            at += size
        at = data.find(FATBIN, at + 4)
    path.write_bytes(data)


def _strip_bundle(data: bytearray, at: int, end: int) -> None:
    """The same for the kernels of one file.   writes: data"""
    entries = []
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        (capability,) = struct.unpack_from("<I", data, at + 28)
        entries.append((kind, capability, at + header, size))
        at += header + size
    is_native = any(entry[:2] == (BINARY, HOPPER) for entry in entries)
    for kind, capability, first, size in entries:
        is_read = kind == PTX and not is_native and capability <= HOPPER
        if (kind, capability) != (BINARY, HOPPER) and not is_read:
            data[first : first + size] = bytes(size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    work, site = out / "work", out / "work" / "site"
    shutil.rmtree(work, ignore_errors=True)
    site.mkdir(parents=True)
    for wheel in download((VLLM, *NEEDED), work / "wheels"):
        unpack(wheel, site)
    for path in site.glob("vllm/*.so"):
        strip_library(path)
    archive = out / "vllm.tar.xz"
    subprocess.run(f"tar -C {work} -cf - site | xz -T2 -3 > {archive}", shell=True, check=True)
    subprocess.run(["split", "-b", str(PART_BYTES), "-d", archive, f"{archive}."], check=True)
    archive.unlink()
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
