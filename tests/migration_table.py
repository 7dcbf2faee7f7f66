"""docs/migrating.md: what scripts made for vLLM do here.

`python tests/migration_table.py` runs each line of CASES and writes the page from what happens: a
line works, or is refused, or is taken as something else, and the text beside it is what headstock
says. Where the same line means something else, the case says what, and shows it.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from headstock import LLM, NotSupported, SamplingParams
from headstock.config import resolve_flags, resolve_keywords
from headstock.logs import show_logs
from headstock_openai_server.command import make_parser

PAGE = Path(__file__).parents[1] / "docs" / "migrating.md"


@frozen(kw_only=True)
class Case:
    """One line of a script.

    here: the line that does the same, where the names differ
    shows: an expression that is true afterwards
    differs: in what way the line means something else; it then works
    """

    vllm: str
    here: str = ""
    shows: str = "True"
    differs: str = ""


def case(vllm: str, shows: str = "True", here: str = "", differs: str = "") -> Case:
    return Case(vllm=vllm, here=here, shows=shows, differs=differs)


IMPORTS = [
    case("from vllm import LLM, SamplingParams", here="from headstock import LLM, SamplingParams"),
    case(
        "from vllm import RequestOutput, CompletionOutput",
        here="from headstock import RequestOutput, CompletionOutput",
    ),
    case(
        "from vllm import EngineArgs",
        here="from headstock import EngineArgs",
        shows="vars(EngineArgs(model='demo', max_model_len=64))['max_model_len'] == 64",
    ),
    *(
        case(f"from {home} import {name}", here=f"from headstock import {name}")
        for home, name in (
            ("vllm", "AsyncLLMEngine"),
            ("vllm.v1.engine.async_llm", "AsyncLLM"),
            ("vllm", "AsyncEngineArgs"),
            ("vllm", "LLMEngine"),
            ("vllm.sampling_params", "RequestOutputKind"),
            ("vllm.utils.argparse_utils", "FlexibleArgumentParser"),
            ("vllm", "PoolingParams"),
            ("vllm.lora.request", "LoRARequest"),
            ("sglang", "Engine"),
        )
    ),
]

CALLS = [
    case(
        "outputs = llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95))",
        "[each.prompt for each in outputs] == prompts and outputs[0].outputs[0].text",
    ),
    case("outputs = llm.generate('12 + 30 =')", "len(outputs) == 1"),
    case(
        "outputs = llm.generate({'prompt_token_ids': [5, 6, 7]})",
        "outputs[0].prompt_token_ids == [5, 6, 7] and outputs[0].prompt is None",
    ),
    case(
        "outputs = llm.generate(prompts, [SamplingParams(max_tokens=n) for n in (1, 2)])",
        "[len(each.outputs[0].token_ids) for each in outputs] == [1, 2]",
    ),
    case("llm.generate(prompts, use_tqdm=True, priority=[0, 1])"),
    case("llm.generate(prompts, lora_request=None)"),
    case("llm.generate(prompts, lora_request=LoRARequest('a', 1, 'path'))"),
    case(
        "outputs = llm.chat(messages, SamplingParams(max_tokens=4))",
        "outputs[0].outputs[0].text",
    ),
    case("outputs = llm.chat([messages, messages])", "len(outputs) == 2"),
    case(
        "outputs = llm.chat(messages, tools=tools, chat_template=template)",
        "'add' in outputs[0].prompt",
    ),
    case(
        "outputs = llm.chat(messages, chat_template=template, "
        "chat_template_kwargs={'enable_thinking': False})",
        "'no thinking' in outputs[0].prompt",
    ),
    case("llm.chat(messages, chat_template_content_format='openai')"),
    case(
        "outputs = llm.chat(begun, add_generation_prompt=False, continue_final_message=True)",
        "outputs[0].prompt.endswith('It is')",
    ),
    case(
        "params = llm.get_default_sampling_params(); params.temperature = 0.5; "
        "llm.generate(prompts, params)",
        "params.temperature == 0.5",
    ),
    case(
        "tokenizer = llm.get_tokenizer(); text = tokenizer.apply_chat_template(messages, "
        "tokenize=False)",
        "'2 + 3' in text",
    ),
    case("outputs = llm.embed(prompts)", "len(outputs[0].outputs.embedding) == 256"),
    case("llm.reset_prefix_cache()"),
    case(
        "stream = engine.generate(prompt, params, request_id)",
        here="stream = llm.astream(prompt, params)",
        shows="read(stream)",
    ),
    *(
        case(f"llm.{call}")
        for call in (
            "beam_search(prompts, params)",
            "encode(prompts)",
            "classify(prompts)",
            "score(prompts[0], prompts[1])",
            "sleep()",
            "wake_up()",
            "collective_rpc('method')",
            "apply_model(function)",
            "start_profile()",
            "get_metrics()",
            "llm_engine",
        )
    ),
]

OUTPUTS = [
    case(
        "answer = output.outputs[0]; (answer.index, answer.text, answer.finish_reason, "
        "answer.stop_reason)"
    ),
    case("ids = output.prompt_token_ids + output.outputs[0].token_ids", "isinstance(ids, list)"),
    case(
        "scores = output.outputs[0].logprobs[0]; sampled, *others = scores",
        "sampled == output.outputs[0].token_ids[0] and scores[sampled].rank >= 1",
    ),
    case("scores = output.prompt_logprobs", "scores[0] is None and len(scores) > 1"),
    case("output.outputs[0].cumulative_logprob", "output.outputs[0].cumulative_logprob < 0"),
    case(
        "output.finished and output.request_id and output.metrics",
        differs="times are in seconds of time.monotonic, with `ttft` and `total`",
        shows="output.metrics.ttft <= output.metrics.total",
    ),
    case("output.num_cached_tokens", "output.num_cached_tokens == 0"),
]

PARAMS = [
    *(
        case(f"SamplingParams({text})")
        for text in (
            "n=2, seed=1",
            "temperature=0",
            "top_p=0.9, top_k=-1, min_p=0.1",
            "presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1",
            "stop=['.'], stop_token_ids=[2], include_stop_str_in_output=True",
            "ignore_eos=True, min_tokens=4, max_tokens=8",
            "logprobs=5, prompt_logprobs=0",
            "logit_bias={5: -1.0}, allowed_token_ids=[5, 6]",
            "skip_special_tokens=False",
        )
    ),
    case(
        "SamplingParams()",
        "SamplingParams().max_tokens == 100",
        differs="`max_tokens` is 100, not 16 as in vLLM",
    ),
    case("params = SamplingParams(); params.stop = 'x'", "params.stop == ('x',)"),
    *(
        case(f"SamplingParams({text})")
        for text in (
            "best_of=2",
            "use_beam_search=True",
            "bad_words=['x']",
            "truncate_prompt_tokens=4",
            "detokenize=False",
            "output_kind=2",
            "spaces_between_special_tokens=False",
        )
    ),
]

SETTINGS = [
    *("model='Qwen/Qwen3-0.6B', revision='main'", "dtype='bfloat16', seed=0"),
    *("max_model_len=4096, block_size=16", "max_num_seqs=64, max_num_batched_tokens=2048"),
    *("tensor_parallel_size=1", "gpu_memory_utilization=0.9", "kv_cache_dtype='fp8'"),
    *("load_format='dummy'", "enforce_eager=True", "enforce_eager=False"),
    *("enable_prefix_caching=True", "enable_prefix_caching=False", "enable_chunked_prefill=True"),
    *("async_scheduling=False", "trust_remote_code=False", "trust_remote_code=True"),
    *("pipeline_parallel_size=1", "pipeline_parallel_size=2", "data_parallel_size=2"),
    *("swap_space=4", "cpu_offload_gb=0", "cpu_offload_gb=8", "quantization=None"),
    *("quantization='awq'", "disable_log_stats=True", "tokenizer='other'", "tokenizer_mode='auto'"),
    *("download_dir='/models'", "enable_lora=True", "speculative_config={'method': 'ngram'}"),
    *("task='generate'", "limit_mm_per_prompt={}", "hf_overrides={}", "compilation_config=3"),
]

FLAGS = [
    *("--max-model-len 4096", "--gpu-memory-utilization 0.9", "--tensor-parallel-size 1"),
    *("--served-model-name demo", "--host 0.0.0.0 --port 8000", "--api-key secret"),
    *("--chat-template chat.jinja", "--max-num-seqs 64", "--dtype auto", "--seed 0"),
    *("--enable-auto-tool-choice --tool-call-parser hermes", "--reasoning-parser qwen3"),
    *("--enable-prefix-caching", "--no-enable-prefix-caching", "--enforce-eager"),
    *("--disable-log-requests", "--trust-remote-code", "--quantization awq"),
    *("--kv-cache-dtype fp8", "--enable-lora", "--swap-space 4"),
    *("--enable-tokenizer-info-endpoint", "--root-path /llm", "--uds headstock.sock"),
    "--ssl-certfile server.pem --ssl-keyfile key.pem",
]

TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{{ messages[-1].content }}"
    "{% if enable_thinking is false %} no thinking{% endif %}"
)


def make_names(llm: LLM) -> dict[str, Any]:
    """The names that the lines use."""
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    function = {"name": "add", "parameters": {"type": "object"}}
    asked = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1)
    (output,) = llm.generate("12 + 30 =", asked)

    def read(stream: Any) -> list[Any]:
        async def collect() -> list[Any]:
            return [piece async for piece in stream]

        return asyncio.run(collect())

    return {
        "LLM": LLM,
        "SamplingParams": SamplingParams,
        "LoRARequest": lambda *values: values,
        "llm": llm,
        "prompt": "12 + 30 =",
        "prompts": ["12 + 30 =", "Once upon a time"],
        "params": SamplingParams(max_tokens=2),
        "messages": messages,
        "begun": [*messages, {"role": "assistant", "content": "It is"}],
        "tools": [{"type": "function", "function": function}],
        "template": TEMPLATE,
        "function": len,
        "output": output,
        "read": read,
    }


def run_case(one: Case, names: Mapping[str, Any]) -> tuple[str, str]:
    """The status of a line, and the text of its right column."""
    scope = dict(names)
    try:
        exec(one.here or one.vllm, scope)
    except (NotSupported, ImportError) as error:
        return "refused", str(error)
    assert eval(one.shows, scope), one
    if one.differs:
        return "different", one.differs
    return ("renamed", f"`{one.here}`") if one.here else ("works", "")


def run_setting(text: str) -> tuple[str, str]:
    """As `run_case`, of keywords of LLM."""
    keywords = eval(f"dict({text})")
    try:
        return read_notes(resolve_keywords(keywords, {}).notes)
    except NotSupported as error:
        return "refused", str(error)


def run_flags(text: str) -> tuple[str, str]:
    """As `run_case`, of flags of the server."""
    try:
        return read_notes(resolve_flags(make_parser().parse_args(shlex.split(text)), {}).notes)
    except NotSupported as error:
        return "refused", str(error)


def read_notes(notes: tuple[str, ...]) -> tuple[str, str]:
    """The status that notes on settings mean."""
    (note,) = notes or ("",)
    _, _, said = note.partition(": ")
    if not note or said == "this is already the default behaviour":
        return "works", said
    if "as in vLLM" in said:
        return "works", ""
    return ("different" if "vLLM" in said else "renamed"), said


def make_page(llm: LLM) -> str:
    """The page, with what each line does."""
    names = make_names(llm)
    parts = [
        ("Imports", [(one.vllm, run_case(one, names)) for one in IMPORTS]),
        ("Methods of LLM", [(one.vllm, run_case(one, names)) for one in CALLS]),
        ("Outputs", [(one.vllm, run_case(one, names)) for one in OUTPUTS]),
        ("Sampling parameters", [(one.vllm, run_case(one, names)) for one in PARAMS]),
        ("Keywords of LLM", [(f"LLM({text})", run_setting(text)) for text in SETTINGS]),
        ("Flags of the server", [(text, run_flags(text)) for text in FLAGS]),
    ]
    lines = [HEAD, *(line for title, rows in parts for line in list_lines(title, rows))]
    return "\n".join(lines) + "\n"


def list_lines(title: str, rows: list[tuple[str, tuple[str, str]]]) -> Iterator[str]:
    """A part of the page."""
    yield f"\n## {title}\n"
    yield "| vLLM | here | |\n| --- | --- | --- |"
    for text, (status, said) in rows:
        yield f"| `{text}` | {status} | {said.replace('|', '&#124;')} |"


HEAD = """# Coming from vLLM

Change the import, and most scripts run: names and meanings are vLLM's. `headstock serve --model
NAME` replaces `vllm serve NAME`. Each line below was run, and the right column shows headstock's
response.

| status | meaning |
| --- | --- |
| works | the same line does the same; a value that is the default here is accepted with a note |
| renamed | the same under another name |
| different | the same line works, but means something else |
| refused | an error that says what to do: `NotSupported` for features that headstock lacks |

Two defaults differ: `use_tqdm` is off, and `max_tokens` is 100; `LLM.chat` without parameters may
fill the context. `LLM.generate_async`, `LLM.stream`, `LLM.stream_chat` and their `a...` forms
replace `AsyncLLM`. Fields of HTTP requests are described in [serving](serving.md#fields).
[Configuration](configuration.md) lists the other names of each flag, which `--help` omits."""


def main() -> None:
    """Write the page."""
    show_logs("ERROR")
    with LLM("demo", num_pages=64) as llm:
        PAGE.write_text(make_page(llm), encoding="utf-8")


if __name__ == "__main__":
    main()
