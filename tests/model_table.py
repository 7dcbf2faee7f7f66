"""The tables of docs/models.md: who computes an architecture, and which backends serve it.

`python tests/model_table.py` rewrites them. Families are read from the registry, models that
transformers computes from the cases of its tests. What backends serve follows from their claims and
from config.json with the defaults of transformers, or as published where those differ.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

sys.path.append(str(Path(__file__).parent / "support"))

from decoder_cases import BEHIND_PADDING, REFUSED, SERVED, make_config
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from headstock import registry
from headstock.selection.capabilities import BackendRefused, resolve_capabilities
from headstock.selection.model_needs import AttentionNeeds
from headstock.spi import (
    AttentionQuery,
    DeviceEnv,
    Feature,
    LatentKV,
    LayoutKind,
    Model,
    ModelConfig,
    Phase,
    StateKV,
)

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BACKENDS = ("fa", "fi", "trtllm", "triton", "sdpa")
HOPPER = DeviceEnv(
    device="cuda",
    capability=(9, 0),
    distributions={"vllm": "0.24.0", "flashinfer-python": "0.6.18.post1"},
)
CPU = DeviceEnv(device="cpu")
FALLBACK = "transformers"
LONG = 1 << 17
"""Positions of models with windows; by default some have windows as long as all positions."""
SERVED_LAYERS = 8
"""Layers of models that are built: enough for windows in some of them."""

MODELS: Mapping[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("Llama 2, 3", ""),
    "MistralForCausalLM": ("Mistral 7B", "windows"),
    "MinistralForCausalLM": ("Ministral 8B", "windows"),
    "Mistral3ForConditionalGeneration": (
        "Mistral Small 3, Devstral, Ministral 3, text only",
        "as Mistral",
    ),
    "LlavaForConditionalGeneration": (
        "LLaVA 1.5 and Pixtral over Llama or Mistral, text only",
        "as these",
    ),
    "LlavaNextForConditionalGeneration": ("LLaVA 1.6 over Llama or Mistral, text only", "as these"),
    "LlavaOnevisionForConditionalGeneration": ("LLaVA-OneVision, text only", "as Qwen2"),
    "Idefics3ForConditionalGeneration": ("Idefics3, SmolVLM, text only", ""),
    "SmolVLMForConditionalGeneration": ("SmolVLM2, text only", ""),
    "InternVLForConditionalGeneration": (
        "InternVL 2.5, 3 and 3.5 over Qwen, text only",
        "as Qwen2 or Qwen3",
    ),
    "Glm4vMoeForConditionalGeneration": ("GLM-4.5V, 4.6V, text only", "as GLM-4.5"),
    "Ministral3ForCausalLM": ("Ministral 3", "YaRN, queries that grow with their positions"),
    "MixtralForCausalLM": ("Mixtral", "experts"),
    "GraniteForCausalLM": (
        "Granite 3, dense",
        "factors on embeddings, scores, sums and logits",
    ),
    "GraniteMoeForCausalLM": ("Granite 3 with experts", "the same, and experts"),
    "GraniteMoeSharedForCausalLM": ("Granite 3 with experts", "the same, and a shared expert"),
    "SmolLM3ForCausalLM": ("SmolLM3", "layers without rope"),
    "SeedOssForCausalLM": ("Seed-OSS", "biases"),
    "Ernie4_5ForCausalLM": ("Ernie-4.5", "rope over neighbours"),
    "Ernie4_5_MoeForCausalLM": ("Ernie-4.5", "the same, experts chosen by a bias"),
    "Qwen2ForCausalLM": ("Qwen2, Qwen2.5", "biases, windows"),
    "Qwen2MoeForCausalLM": (
        "Qwen1.5-MoE, Qwen2-MoE",
        "experts, one of them shared by all tokens",
    ),
    "Qwen3ForCausalLM": ("Qwen3", "norms of queries and keys"),
    "Qwen3MoeForCausalLM": ("Qwen3 with experts", "the same, and experts"),
    "Qwen3NextForCausalLM": (
        "Qwen3-Next, Qwen3-Coder-Next",
        "gated delta rules in most layers, gated attention in others, experts",
    ),
    "Qwen3_5ForCausalLM": (
        "Qwen3.5",
        "gated delta rules in most layers, gated attention in others",
    ),
    "Qwen3_5MoeForCausalLM": ("Qwen3.5 with experts", "the same, and experts"),
    "Qwen3_5ForConditionalGeneration": ("Qwen3.5", "the text of a model beside images"),
    "Qwen3_5MoeForConditionalGeneration": (
        "Qwen3.5 with experts",
        "the text of a model beside images",
    ),
    "Qwen2VLForConditionalGeneration": ("Qwen2-VL, text only", "as Qwen2"),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2.5-VL, text only", "as Qwen2"),
    "Qwen3VLForConditionalGeneration": ("Qwen3-VL, text only", "as Qwen3"),
    "Qwen3VLMoeForConditionalGeneration": ("Qwen3-VL with experts, text only", "as Qwen3"),
    "Gemma2ForCausalLM": (
        "Gemma-2",
        "caps, norms before and after, windows in every second layer",
    ),
    "Gemma3ForCausalLM": ("Gemma-3", "two ropes, norms of queries and keys, windows"),
    "Gemma3ForConditionalGeneration": ("Gemma-3, text only", "the same"),
    "Gemma4ForCausalLM": (
        "Gemma-4 26B-A4B and 31B; E2B and E4B are refused",
        "fewer and wider heads in layers without a window, where keys are values; norms of values; "
        "experts beside the feed-forward part",
    ),
    "Gemma4ForConditionalGeneration": ("Gemma-4 26B-A4B and 31B, text only", "the same"),
    "Gemma4UnifiedForCausalLM": ("Gemma-4 12B", "the same, without experts"),
    "Gemma4UnifiedForConditionalGeneration": ("Gemma-4 12B, text only", "the same"),
    "Phi3ForCausalLM": (
        "Phi-3, Phi-3.5, Phi-4",
        "merged projections, partial rope, LongRoPE",
    ),
    "DeepseekV2ForCausalLM": (
        "DeepSeek-V2",
        "one latent vector per token, experts in groups",
    ),
    "DeepseekV3ForCausalLM": ("DeepSeek-V3, R1", "the same, experts by sigmoids and a bias"),
    "Glm4MoeForCausalLM": (
        "GLM-4.5, 4.6, 4.7",
        "partial rope, experts by sigmoids and a bias",
    ),
    "Glm4MoeLiteForCausalLM": ("GLM-4.7-Flash", "as DeepSeek-V3"),
    "HYV3ForCausalLM": (
        "Hy3",
        "norms of queries and keys, experts by sigmoids and a bias",
    ),
    "MiniMaxM2ForCausalLM": (
        "MiniMax-M2",
        "partial rope, norms over whole queries and keys, experts by sigmoids and a bias",
    ),
    "GptOssForCausalLM": (
        "GPT-OSS",
        "attention sinks, windows in every second layer, experts with biases and a bounded gate",
    ),
    "Lfm2ForCausalLM": ("LFM2", "short convolutions in most layers"),
    "Lfm2MoeForCausalLM": ("LFM2 with experts", "the same, and experts"),
    "Olmo2ForCausalLM": ("OLMo-2", "norms only after each part, and over whole queries and keys"),
    "Olmo3ForCausalLM": (
        "OLMo-3",
        "the same, windows in most layers, and scaled rope in the others",
    ),
    "Exaone4ForCausalLM": (
        "EXAONE-4",
        "norms only after each part, no rope in layers without a window",
    ),
}
"""Architecture of a family -> models, and what is in them beside what Llama has."""

GEMMA4 = {"hidden_size_per_layer_input": 0}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "bert": {"is_decoder": True},
    **{name: {"is_decoder": True} for name in BEHIND_PADDING},
    "dots1": {
        "hidden_size": 4096,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
    },
    "granitemoehybrid": {"layer_types": ["attention"] * 8},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3},
    "exaone4": {
        "sliding_window": 4096,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    },
    "gemma4_text": GEMMA4,
    "gemma4": {"text_config": GEMMA4},
    "glm4_moe": {"head_dim": 128},
    "glm4v_moe": {"text_config": {"model_type": "glm4v_moe_text", "head_dim": 128}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 16, "moe_topk": 8},
    "lfm2": {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 8, "num_hidden_layers": 24},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen3_moe": {"head_dim": 128},
}
"""model_type -> what its first models have, where transformers' defaults are other ones."""


@frozen
class Service:
    """What serves an architecture.

    heads: the sizes of its heads, or of its latent vectors
    needs: what its attention has beside full attention
    backends: those that serve it on an H200; for some of its sizes, with these
    """

    heads: str
    needs: str
    backends: tuple[str, ...]


def list_architectures() -> list[str]:
    """The architectures of families, as in the registry."""
    return sorted(_list_packages().keys() - {FALLBACK})


def _list_packages() -> dict[str, str]:
    """Entry point -> the folder of its package, of this repository's families."""
    packages = {
        plugin.name: plugin.distribution.replace("headstock-", "models/", 1)
        for plugin in registry.list_installed("model")
    }
    root = PAGE.parents[1]
    return {name: folder for name, folder in packages.items() if (root / folder).is_dir()}


def list_fallbacks() -> dict[str, str]:
    """model_type -> architecture, of the cases that transformers computes and no family."""
    return _drop_families(SERVED)


def list_refused() -> dict[str, str]:
    """model_type -> architecture, of the cases that are refused and that no family serves."""
    return _drop_families(REFUSED)


def _drop_families(model_types: Iterable[str]) -> dict[str, str]:
    families = set(list_architectures())
    names = {each: _first(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[each]) for each in model_types}
    return {
        each: name for each, name in sorted(names.items(), key=_by_name) if name not in families
    }


def _by_name(pair: tuple[str, str]) -> str:
    return pair[1].lower()


def _first(names: str | tuple[str, ...]) -> str:
    return names if isinstance(names, str) else names[0]


def find_model_type(architecture: str) -> str:
    """The model_type whose class this is; of several, the one whose name is most like it."""
    tables = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    types = [
        model_type
        for table in tables
        for model_type, names in table.items()
        if architecture in ((names,) if isinstance(names, str) else names)
    ]
    # Beside that of the text alone there may be that of the whole model.
    texts = [each for each in types if each.endswith("_text")]
    return min(texts or types, key=len) if "CausalLM" in architecture else min(types, key=len)


def read_default(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    """config.json of the architecture's first models."""
    default = AutoConfig.for_model(model_type).get_text_config()
    fields = {**PUBLISHED.get(model_type, {}), **changes}
    window = fields.get("sliding_window") or getattr(default, "sliding_window", None)
    if window:
        fields["max_position_embeddings"] = LONG
    config = AutoConfig.for_model(model_type, **fields).to_dict()
    return {**config, "architectures": [architecture], "model_type": model_type}


def make_family(name: str) -> Model:
    """The family of an entry point."""
    return registry.make_family(registry.load_spec("model", name))


def make_needs(config: ModelConfig, dtype: str) -> AttentionNeeds:
    """What the model asks of a backend over pages of any size."""
    return AttentionNeeds(
        model=config,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=None,
        contiguous=False,
        max_rows=256,
        max_seq_len=4096,
    )


def find_service(config: ModelConfig) -> Service:
    """What serves a model of this shape."""
    needs = make_needs(config, "bfloat16")
    # What the page says of all of them.
    assert serves("sdpa", make_needs(config, "float32"), CPU), config.architecture
    query = needs.make_query(frozenset(Phase))
    features = frozenset[Feature]().union(*(group.features for group in query.groups))
    words = [WORDS[each] for each in WORDS if each in features]
    words += ["a state"] if LayoutKind.STATE in needs.layouts else []
    return Service(
        heads=", ".join(_list_sizes(query)),
        needs=", ".join(words),
        backends=tuple(_list_backends(needs)),
    )


def _list_sizes(query: AttentionQuery) -> list[str]:
    """The sizes of heads that are asked for."""
    sizes = (
        f"{group.layout.out_dim} + {group.layout.rope_dim}"
        if isinstance(group.layout, LatentKV)
        else str(group.layout.k_dim)
        for group in query.groups
        if not isinstance(group.layout, StateKV)
    )
    return list(dict.fromkeys(sizes))


def _list_backends(needs: AttentionNeeds) -> Iterator[str]:
    """The backends that serve the model, or some shapes of its KV groups, with their sizes."""
    parts = needs.split_groups()
    for name in BACKENDS:
        served = [groups for groups in parts if serves(name, needs, groups=groups)]
        query = needs.make_query(frozenset(Phase), [group for each in served for group in each])
        if len(served) == len(parts):
            yield f"`{name}`"
        elif served:
            yield f"`{name}` ({', '.join(_list_sizes(query))})"


WORDS = {
    Feature.SLIDING_WINDOW: "windows",
    Feature.SOFTCAP: "a cap",
    Feature.SINKS: "sinks",
}


def serves(
    name: str,
    needs: AttentionNeeds,
    env: DeviceEnv = HOPPER,
    groups: Sequence[int] | None = None,
) -> bool:
    """Whether the backend claims all that these KV groups of the model need."""
    spec = registry.load_spec("attention", name)
    try:
        resolve_capabilities(spec, needs.make_query(frozenset(Phase), groups), env)
    except BackendRefused:
        return False
    return True


def make_native_rows() -> Iterator[str]:
    """A row for each architecture of a family."""
    for name in list_architectures():
        family = make_family(name)
        service = find_service(family.config(read_default(name, find_model_type(name))))
        models, beyond = MODELS[name]
        yield _row(f"`{name}`", models, f"`{_list_packages()[name]}`", beyond, *_cells(service))


def make_fallback_rows() -> Iterator[str]:
    """A row for each architecture that transformers computes and no family."""
    for model_type, name in list_fallbacks().items():
        default = AutoConfig.for_model(model_type)
        changes = {"num_hidden_layers": min(int(default.num_hidden_layers), SERVED_LAYERS)}
        config = make_family(FALLBACK).config(read_default(name, model_type, **changes))
        service = find_service(config)
        replayed = "yes" if config.is_capturable else f"no: {config.capture_obstacle}"
        yield _row(f"`{name}`", service.needs, *_cells(service), replayed)


def make_refused_rows() -> Iterator[str]:
    """A row for each architecture that transformers' module cannot serve, with the reason."""
    for model_type, name in list_refused().items():
        try:
            make_family(FALLBACK).config(make_config(model_type, REFUSED[model_type][0]))
        except ValueError as error:
            reason = re.sub(rf"^{name},? ", "", str(error))
            yield _row(f"`{name}`", reason)


def _cells(service: Service) -> tuple[str, str]:
    return service.heads, ", ".join(service.backends)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


TABLES = {
    "architecture | models | package | beyond Llama | heads of | on an H200": make_native_rows,
    "architecture | attention with | heads of | on an H200 | in graphs": make_fallback_rows,
    "architecture | why it is refused": make_refused_rows,
}
"""The heading of each table, and what makes its rows."""


def read_rows(page: str, heading: str) -> list[str]:
    """The rows of the table with this heading."""
    _, _, rest = page.partition(f"| {heading} |\n")
    rows = rest.split("\n\n")[0].splitlines()
    return rows[1:]


def replace_rows(page: str, heading: str, rows: Iterable[str]) -> str:
    """The page with other rows in the table with this heading."""
    before, found, rest = page.partition(f"| {heading} |\n")
    assert found, heading
    rule, _, _ = rest.partition("\n")
    _, _, after = rest.partition("\n\n")
    return f"{before}{found}{rule}\n" + "".join(f"{row}\n" for row in rows) + f"\n{after}"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    page = PAGE.read_text(encoding="utf-8")
    for heading, make_rows in TABLES.items():
        page = replace_rows(page, heading, make_rows())
    PAGE.write_text(page, encoding="utf-8")
