"""The providers' functions behind one interface: `kernel(q, k, v, plan, layer, out, needs_lse)`.

q: [tokens, heads, k_dim]    k, v: [pages, page_size, kv_heads, dim], views of the pool
q_v: [tokens, heads, v_dim], whose products with `v` are added to the scores; only FlashAttention-3
    supports it, with a `k_dim` of 64 and a `v_dim` of 512
writes: out [tokens, heads, v_dim]
returns: LSE [tokens, heads] float32, natural logarithm, a view of any strides; it may be None
    unless it is needed
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from headstock.nn.attention.device import count_processors
from headstock.spi import LayerInfo
from headstock_fa.step import FlashPlan
from headstock_fa.tile_schedule import SharedWork, TileSchedule, choose_schedule, list_margins


class Kernel(Protocol):
    """The result of the loaders below."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: FlashPlan,
        layer: LayerInfo,
        out: Tensor,
        needs_lse: bool,
        q_v: Tensor | None = None,
    ) -> Tensor | None:
        """Attend, as this module says."""


VLLM_LIBRARY = "vllm_flash_attn/_vllm_fa3_C.abi3.so"

VLLM_NEUTRAL = {
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "num_splits": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
"""Arguments of vLLM's operator that are neither None nor set by a call."""


def _window(layer: LayerInfo, plan: FlashPlan) -> tuple[int, int]:
    """Number of tokens before and after itself that a query sees, -1 for all."""
    return (-1 if layer.window is None else layer.window - 1), (0 if plan.is_causal else -1)


def load_interface() -> Kernel:
    """FlashAttention-3 from its own package."""
    attend = import_module("flash_attn_interface").flash_attn_with_kvcache

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: FlashPlan,
        layer: LayerInfo,
        out: Tensor,
        needs_lse: bool,
        q_v: Tensor | None = None,
    ) -> Tensor | None:
        # The package returns its own tensor, with undefined numbers outside rows. Hence
        # GraphSupport.DECODE: padding would copy them (decision 0016).
        answer = attend(
            q,
            k,
            v,
            cache_seqlens=plan.context_lens,
            page_table=plan.page_tables[layer.group],
            cu_seqlens_q=plan.query_start,
            max_seqlen_q=plan.max_query_len,
            softmax_scale=layer.scale,
            causal=plan.is_causal,
            window_size=_window(layer, plan),
            softcap=layer.softcap,
            num_splits=plan.num_splits,
            return_softmax_lse=needs_lse,
            **({} if q_v is None else {"qv": q_v}),
        )
        out.copy_(answer[0] if needs_lse else answer)
        # FlashAttention's own order is [heads, tokens].
        return answer[1].t() if needs_lse else None

    return kernel


def load_vllm() -> Kernel:
    """FlashAttention-3 from an installed vLLM, which is not imported.

    raises: ValueError when that vLLM was built without it
    """
    spec = find_spec("vllm")
    folders = [] if spec is None else spec.submodule_search_locations or []
    libraries = [path for folder in folders if (path := Path(folder) / VLLM_LIBRARY).exists()]
    if not libraries:
        raise ValueError(
            f"the installed vllm has no {VLLM_LIBRARY}; install a build of vllm for CUDA, or set "
            "attn (--attn) to fi"
        )
    torch.ops.load_library(str(libraries[0]))  # type: ignore[no-untyped-call]
    library = torch.ops._vllm_fa3_C
    scheduler = getattr(library, "get_scheduler_metadata", None)
    return VllmKernel(library.fwd.default, None if scheduler is None else scheduler.default)


class PlacedOperator:
    """An operator, called with positional arguments in the order of its schema."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        names = [argument.name for argument in operator._schema.arguments]
        self.places = {name: place for place, name in enumerate(names)}
        self.neutral: list[Any] = [VLLM_NEUTRAL.get(name) for name in names]

    def __call__(self, values: Mapping[str, object]) -> Any:
        """Call the operator with these arguments and its neutral ones."""
        arguments = self.neutral.copy()
        for name, value in values.items():
            arguments[self.places[name]] = value
        return self.operator(*arguments)


LayerKind = tuple[torch.Size, torch.Size, int, torch.dtype, tuple[int, int], bool]
"""The key of schedules: queries [heads, head_dim], keys [page_size, kv_heads, head_dim], numbers of
a value, type of queries, window, whether scores have a soft cap."""

SCHEDULER_ARGUMENTS = frozenset(
    """batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim headdim_v qkv_dtype
    seqused_k cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q leftpad_k page_size
    max_seqlen_k_new is_causal window_size_left window_size_right has_softcap num_splits pack_gqa
    sm_margin""".split()
)
"""The arguments of vLLM's scheduler. With other arguments, `fwd` might not accept its schedule."""


class VllmKernel:
    """vLLM's operator; `scheduler` makes its schedules once per step, or each call makes its
    own."""

    def __init__(self, operator: Any, scheduler: Any = None) -> None:
        self.attend = PlacedOperator(operator)
        self.scheduler: PlacedOperator | None = None
        if scheduler is not None:
            placed = PlacedOperator(scheduler)
            if placed.places.keys() == SCHEDULER_ARGUMENTS:
                self.scheduler = placed

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: FlashPlan,
        layer: LayerInfo,
        out: Tensor,
        needs_lse: bool,
        q_v: Tensor | None = None,
    ) -> Tensor | None:
        """Attend, as this module says."""
        left, right = _window(layer, plan)
        values: dict[str, object] = {
            "q": q,
            "k": k,
            "v": v,
            "q_v": q_v,
            "out": out,
            "cu_seqlens_q": plan.query_start,
            "seqused_k": plan.context_lens,
            "max_seqlen_q": plan.max_query_len,
            "max_seqlen_k": plan.max_context_len,
            "page_table": plan.page_tables[layer.group],
            "softmax_scale": layer.scale,
            "is_causal": plan.is_causal,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": layer.softcap,
            "num_splits": plan.num_splits,
        }
        # Without parts to merge, the library resets a schedule by a separate launch, which costs as
        # much as it saves. It makes no schedule for an empty step.
        if self.scheduler is not None and plan.num_splits > 1 and plan.num_rows and q_v is None:
            values["scheduler_metadata"] = self.find_schedule(q, k, v, plan, layer)
        lse: Tensor = self.attend(values)[1].t()
        return lse

    def find_schedule(
        self, q: Tensor, k: Tensor, v: Tensor, plan: FlashPlan, layer: LayerInfo
    ) -> Tensor:
        """The plan's schedule for layers like this one, made for the first of them."""
        shapes = (q.shape[1:], k.shape[1:], v.shape[-1])
        kind = (*shapes, q.dtype, _window(layer, plan), layer.softcap > 0)
        schedule = plan.schedules.get(kind)
        if schedule is None:
            make = partial(self.make_schedule, kind)
            schedule = plan.schedules[kind] = TileSchedule(make(plan), make)
        return schedule.tensor

    def make_schedule(self, kind: LayerKind, plan: FlashPlan) -> Tensor:
        """The schedule of the plan's current step, for layers of a kind.

        returns: int32, in the library's layout
        """
        (heads, head_dim), (page_size, kv_heads, _), v_dim, dtype, window, softcap = kind
        assert self.scheduler is not None
        values: dict[str, object] = {
            "batch_size": plan.num_rows,
            "max_seqlen_q": plan.max_query_len,
            "max_seqlen_k": plan.max_context_len,
            "num_heads": heads,
            "num_heads_k": kv_heads,
            "headdim": head_dim,
            "headdim_v": v_dim,
            "qkv_dtype": dtype,
            "seqused_k": plan.context_lens,
            "cu_seqlens_q": plan.query_start,
            "page_size": page_size,
            "max_seqlen_k_new": 0,
            "is_causal": plan.is_causal,
            "window_size_left": window[0],
            "window_size_right": window[1],
            "has_softcap": softcap,
            "num_splits": plan.num_splits,
        }
        if plan.rest_lens is None:
            return cast("Tensor", self.scheduler(values))
        processors = count_processors(plan.context_lens.device)
        schedules = [
            self.scheduler(values | {"sm_margin": margin}) for margin in list_margins(processors)
        ]
        work = SharedWork(
            query_start=plan.query_start,
            prefix_lens=plan.context_lens,
            rest_lens=plan.rest_lens,
            group=heads // kv_heads,
        )
        return choose_schedule(schedules, work, processors)


def load_flash_attn() -> Kernel:
    """FlashAttention-2 from its own package: one function for ragged queries, one for decode."""
    library = import_module("flash_attn")
    ragged, decode = library.flash_attn_varlen_func, library.flash_attn_with_kvcache

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: FlashPlan,
        layer: LayerInfo,
        out: Tensor,
        needs_lse: bool,
        q_v: Tensor | None = None,
    ) -> Tensor | None:
        assert q_v is None, "FlashAttention-2 does not support latent vectors"
        sums: Tensor
        page_table = plan.page_tables[layer.group]
        shared: dict[str, Any] = {
            "softmax_scale": layer.scale,
            "causal": plan.is_causal,
            "window_size": _window(layer, plan),
            "softcap": layer.softcap,
            "block_table": page_table,
        }
        # Decode never reads `context_start`: a graph would keep its value from the capture.
        if plan.is_decode:
            answer, sums = decode(
                q[:, None],
                k,
                v,
                cache_seqlens=plan.context_lens,
                num_splits=plan.num_splits,
                return_softmax_lse=True,
                **shared,
            )
            out.copy_(answer[:, 0])
            return sums[:, :, 0]
        lengths = (plan.query_start, plan.context_start, plan.max_query_len, plan.max_context_len)
        answer, sums, _ = ragged(q, k, v, *lengths, return_attn_probs=True, **shared)
        out.copy_(answer)
        return sums.t()

    return kernel


def load_torch() -> Kernel:
    """FlashAttention-2 inside torch."""
    library = import_module("torch.nn.attention.varlen")
    # With `seqused_k` and a page table, the kernel does not read where contexts start, so a graph
    # may keep an old value.
    attend, aux = library.varlen_attn_out, library.AuxRequest(lse=True)

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: FlashPlan,
        layer: LayerInfo,
        out: Tensor,
        needs_lse: bool,
        q_v: Tensor | None = None,
    ) -> Tensor | None:
        assert q_v is None, "FlashAttention-2 does not support latent vectors"
        answer = attend(
            out,
            q,
            k,
            v,
            plan.query_start,
            plan.context_start,
            plan.max_query_len,
            plan.max_context_len,
            return_aux=aux if needs_lse else None,
            scale=layer.scale,
            window_size=_window(layer, plan),
            enable_gqa=q.shape[1] != k.shape[2],
            seqused_k=plan.context_lens,
            block_table=plan.page_tables[layer.group],
            num_splits=plan.num_splits or None,
        )
        return answer[1].t() if needs_lse else None

    return kernel
