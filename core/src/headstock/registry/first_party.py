"""Where this project's own plugins live, for hints on how to install them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FOLDERS: Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]] = MappingProxyType(
    {
        "backends/flash-attn": ("headstock-flash-attn", {"attention": ("fa",)}),
        "backends/flashinfer": ("headstock-flashinfer", {"attention": ("fi",)}),
        "backends/trtllm": ("headstock-trtllm", {"attention": ("trtllm",)}),
        "backends/sdpa": ("headstock-sdpa", {"attention": ("sdpa",)}),
        "backends/triton": ("headstock-triton-attention", {"attention": ("triton",)}),
        "plugins/bench": ("headstock-bench", {"command": ("bench", "tune")}),
        "plugins/cuda-graph": ("headstock-cuda-graph", {"runner": ("cudagraph",)}),
        "plugins/llguidance-grammar": ("headstock-llguidance", {"grammar": ("llguidance",)}),
        "plugins/naive-cache": ("headstock-naive-cache", {"cache": ("naive",)}),
        "plugins/multiprocess": ("headstock-multiprocess", {"executor": ("multiprocess",)}),
        "plugins/draft-proposer": ("headstock-draft-proposer", {"proposer": ("draft",)}),
        "plugins/mtp-proposer": ("headstock-mtp-proposer", {"proposer": ("mtp",)}),
        "plugins/ngram-proposer": ("headstock-ngram-proposer", {"proposer": ("ngram",)}),
        "plugins/openai-server": ("headstock-openai-server", {"command": ("serve",)}),
        "plugins/radix-cache": ("headstock-radix-cache", {"cache": ("radix",)}),
        "plugins/ray": ("headstock-ray", {"executor": ("ray",)}),
        "plugins/replay-view": ("headstock-replay-view", {"command": ("replay-view",)}),
        "plugins/tool-parsers": (
            "headstock-tool-parsers",
            {"tools": ("hermes", "llama3_json", "mistral", "qwen3_coder")},
        ),
        "plugins/triton-ops": ("headstock-triton-ops", {"ops": ("triton",)}),
        "models/deepseek": (
            "headstock-deepseek",
            {
                "model": (
                    "DeepseekV2ForCausalLM",
                    "DeepseekV3ForCausalLM",
                    "Glm4MoeForCausalLM",
                    "Glm4MoeLiteForCausalLM",
                    "Glm4vMoeForConditionalGeneration",
                    "HYV3ForCausalLM",
                    "MiniMaxM2ForCausalLM",
                )
            },
        ),
        "models/gemma": (
            "headstock-gemma",
            {
                "model": (
                    "Gemma2ForCausalLM",
                    "Gemma3ForCausalLM",
                    "Gemma3ForConditionalGeneration",
                    "Gemma4ForCausalLM",
                    "Gemma4ForConditionalGeneration",
                    "Gemma4UnifiedForCausalLM",
                    "Gemma4UnifiedForConditionalGeneration",
                )
            },
        ),
        "models/gpt-oss": ("headstock-gpt-oss", {"model": ("GptOssForCausalLM",)}),
        "models/lfm2": ("headstock-lfm2", {"model": ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")}),
        "models/llama": (
            "headstock-llama",
            {
                "model": (
                    "Ernie4_5ForCausalLM",
                    "Ernie4_5_MoeForCausalLM",
                    "GraniteForCausalLM",
                    "GraniteMoeForCausalLM",
                    "GraniteMoeSharedForCausalLM",
                    "Idefics3ForConditionalGeneration",
                    "LlamaForCausalLM",
                    "LlavaForConditionalGeneration",
                    "LlavaNextForConditionalGeneration",
                    "MinistralForCausalLM",
                    "Ministral3ForCausalLM",
                    "Mistral3ForConditionalGeneration",
                    "MistralForCausalLM",
                    "MixtralForCausalLM",
                    "SeedOssForCausalLM",
                    "SmolLM3ForCausalLM",
                    "SmolVLMForConditionalGeneration",
                )
            },
        ),
        "models/olmo": (
            "headstock-olmo",
            {"model": ("Exaone4ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM")},
        ),
        "models/phi": ("headstock-phi", {"model": ("Phi3ForCausalLM",)}),
        "models/qwen": (
            "headstock-qwen",
            {
                "model": (
                    "InternVLForConditionalGeneration",
                    "LlavaOnevisionForConditionalGeneration",
                    "Qwen2ForCausalLM",
                    "Qwen2MoeForCausalLM",
                    "Qwen2VLForConditionalGeneration",
                    "Qwen2_5_VLForConditionalGeneration",
                    "Qwen3ForCausalLM",
                    "Qwen3_5ForCausalLM",
                    "Qwen3_5ForConditionalGeneration",
                    "Qwen3_5MoeForCausalLM",
                    "Qwen3_5MoeForConditionalGeneration",
                    "Qwen3MoeForCausalLM",
                    "Qwen3NextForCausalLM",
                    "Qwen3VLForConditionalGeneration",
                    "Qwen3VLMoeForConditionalGeneration",
                )
            },
        ),
        "models/transformers": ("headstock-transformers", {"model": ("transformers",)}),
        "models/demo": ("headstock-demo", {"checkpoint": ("demo",)}),
    }
)
"""Folder in a checkout -> (distribution, kind -> names)."""


CHECKOUT = "(in a checkout of headstock)"
"""Where the pip lines of this module work: no package index has these distributions yet."""

CONFORMANCE_LINE = f"pip install ./plugins/conformance {CHECKOUT}"
"""Installs the checks of plugins, which are not a plugin themselves."""


def install_lines(kind: str) -> dict[str, str]:
    """Map each first-party plugin of `kind` outside core to the pip line that installs it."""
    return {
        name: f"pip install ./{folder} {CHECKOUT}"
        for folder, (_, names) in FOLDERS.items()
        for name in names.get(kind, ())
    }


def find_distribution(name: str) -> tuple[str, str]:
    """Find a distribution of this project, and its pip line, by its name or its folder's ("qwen").

    Both are empty for other names.
    """
    for folder, (distribution, names) in FOLDERS.items():
        kind, (first, *_) = next(iter(names.items()))
        if name in (distribution, folder.rpartition("/")[2]):
            return distribution, install_lines(kind)[first]
    return "", ""


def upgrade_line(distribution: str) -> str:
    """The pip line that upgrades a distribution, of this project or of another."""
    folders = {name: folder for folder, (name, _) in FOLDERS.items()} | {"headstock": "core"}
    folder = folders.get(distribution)
    return (
        f"pip install --upgrade ./{folder} {CHECKOUT}"
        if folder
        else f"pip install --upgrade {distribution}"
    )
