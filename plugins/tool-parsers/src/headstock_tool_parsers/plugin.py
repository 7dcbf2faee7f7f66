"""The specs of the tool parsers."""

from __future__ import annotations

from headstock.spi import SpiRange, ToolParserSpec


def hermes() -> ToolParserSpec:
    """The spec of `hermes`."""
    return ToolParserSpec(
        name="hermes",
        spi=SpiRange(0, 3),
        summary="<tool_call>{...}</tool_call>: Hermes, Qwen2.5, Qwen3",
        implementation="headstock_tool_parsers.hermes:HermesParser",
        special_tokens=("<tool_call>", "</tool_call>"),
    )


def llama3_json() -> ToolParserSpec:
    """The spec of `llama3_json`."""
    return ToolParserSpec(
        name="llama3_json",
        spi=SpiRange(0, 3),
        summary="a JSON object with name and parameters: Llama 3",
        implementation="headstock_tool_parsers.llama3_json:Llama3JsonParser",
        special_tokens=("<|python_tag|>",),
    )


def mistral() -> ToolParserSpec:
    """The spec of `mistral`."""
    return ToolParserSpec(
        name="mistral",
        spi=SpiRange(0, 3),
        summary="[TOOL_CALLS] and a list, or a name and [ARGS]: Mistral",
        implementation="headstock_tool_parsers.mistral:MistralParser",
        special_tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    )


def qwen3_coder() -> ToolParserSpec:
    """The spec of `qwen3_coder`."""
    return ToolParserSpec(
        name="qwen3_coder",
        spi=SpiRange(0, 3),
        summary="<function=f> and <parameter=k> in <tool_call>: Qwen3-Coder",
        implementation="headstock_tool_parsers.qwen3_coder:Qwen3CoderParser",
        special_tokens=("<tool_call>", "</tool_call>"),
    )
