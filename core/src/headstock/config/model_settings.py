"""The settings of an engine that say which model it serves, and how chats with it are read."""

from __future__ import annotations

from attrs import frozen

from headstock.config.patterns import DTYPE_SPELLINGS, MARK_SPELLINGS, NAME
from headstock.config.setting import setting_field
from headstock.config.value_types import Choice, Integer, Switch, Text


@frozen(kw_only=True)
class ModelSettings:
    """The first settings of an EngineConfig."""

    model: str = setting_field(
        "--model",
        Text(form="NAME|DIR|HUB-ID"),
        "demo",
        "an installed checkpoint's name, a directory in Hugging Face layout, a GGUF file, or a "
        "hub id",
        aliases=("--model-path", "-m"),
        default_text="demo, the bundled checkpoint",
        group="model",
        shapes_steps=False,
    )
    revision: str | None = setting_field(
        "--revision",
        Text(form="BRANCH|TAG|COMMIT", word="auto"),
        None,
        "revision of a model on the hub, of its weights and its tokenizer",
        default_text="auto: the main branch",
        group="model",
        shapes_steps=False,
    )
    model_family: str = setting_field(
        "--model-family",
        NAME,
        "auto",
        "distribution whose family reads the model, where several provide one for it",
        default_text="auto: the only one",
        group="model",
    )
    model_impl: str = setting_field(
        "--model-impl",
        Choice(names=("auto", "native", "transformers")),
        "auto",
        "who computes the model; native: a family; transformers: its module, over headstock's "
        "pages; auto: transformers where no family serves the architecture",
        group="model",
    )
    dtype: str = setting_field(
        "--dtype",
        Choice(names=("auto", "float32", "bfloat16", "float16"), spellings=DTYPE_SPELLINGS),
        "auto",
        (
            "type of weights and activations; auto: float32 on a CPU; on CUDA the checkpoint's, "
            "but float16 for float32"
        ),
        group="model",
    )
    device: str = setting_field(
        "--device",
        Choice(names=("auto", "cpu", "cuda"), spellings={"gpu": "cuda"}),
        "auto",
        "where to run; auto: CUDA when there is one",
        group="model",
    )
    load_format: str = setting_field(
        "--load-format",
        Choice(names=("auto", "dummy")),
        "auto",
        "dummy: random weights of the right shapes",
        group="model",
    )
    quant: str = setting_field(
        "--quant",
        Choice(
            names=("off", "fp8", "int8", "int4"),
            spellings={"none": "off"},
        ),
        "off",
        "numbers that linear maps are quantized to at load; off: as the checkpoint has them",
        group="model",
    )
    chat_template: str | None = setting_field(
        "--chat-template",
        Text(form="FILE|TEXT", word="auto"),
        None,
        "Jinja template of chats instead of the model's; as a flag of run it implies --chat",
        default_text="auto: the model's",
        group="model",
        shapes_steps=False,
    )
    tool_parser: str = setting_field(
        "--tool-parser",
        NAME,
        "auto",
        "parser that extracts tool calls from chat output; off: none",
        aliases=("--tool-call-parser",),
        default_text="auto: by the chat template",
        group="model",
        shapes_steps=False,
    )
    reasoning_parser: str = setting_field(
        "--reasoning-parser",
        Choice(
            names=("auto", "off", "think", "qwen3", "mistral", "seed"), spellings=MARK_SPELLINGS
        ),
        "auto",
        "marks that tell reasoning from the answer in chats; auto: those of the chat template",
        group="model",
        shapes_steps=False,
    )
    scoring: str = setting_field(
        "--scoring",
        Choice(names=("auto", "yes-no", "cosine")),
        "auto",
        "how documents are scored against queries; yes-no: by the next token, as Qwen3-Reranker; "
        "cosine: by their vectors; auto: as the checkpoint's modules.json says",
        group="model",
        shapes_steps=False,
        listed="server",
    )
    max_seq_len: int | None = setting_field(
        "--max-seq-len",
        Integer(least=1, word="auto"),
        None,
        "maximum number of tokens of a request, prompt and output together; with "
        "--max-seq-len-or-less, cut to the model's limit",
        aliases=("--max-seq-len-override", "--max-model-len"),
        default_text="from the model, cut to what the pool can hold",
        group="model",
    )
    # A switch beside the size, so that presets need no special case and a plain size still fails
    # when it cannot be served (docs/decisions/0006-configuration.md).
    max_seq_len_or_less: bool = setting_field(
        "--max-seq-len-or-less",
        Switch(),
        False,
        "cut --max-seq-len to the model's limit instead of failing",
        group="model",
        listed="never",
    )
