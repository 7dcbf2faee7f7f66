"""Find out how a decoder attends, and refuse what pages would make wrong in silence."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

import torch
from torch import nn

from headstock_transformers.attention import CALLS, PROBED, AttentionCall, CallList, MaskFunction
from headstock_transformers.module import Decoder, GivenStates, in_one_line

_TOKENS = 8
_FARTHEST = 1 << 20
"""The last position at which masks are read."""


def probe_decoder(decoder: Decoder) -> tuple[tuple[AttentionCall, int | None], ...]:
    """How each layer calls attention, and its window.   raises: ValueError with a reason"""
    name = type(decoder.model).__name__
    if any(isinstance(module, nn.Conv1d) for module in decoder.model.modules()):
        raise ValueError(f"{name} has layers that keep a state: convolutions over tokens")
    calls = _run_once(decoder, name)
    layers = [call.layer for call in calls]
    count = int(decoder.text.num_hidden_layers)
    if layers != list(range(count)):
        doubled = next((each for each in layers if layers.count(each) > 1), None)
        raise ValueError(
            f"{name} calls attention twice in layer {doubled}"
            if doubled is not None
            else f"{name} calls attention in {len(layers)} of {count} layers; the others keep a "
            "state or share the keys of others"
        )
    for call in calls:
        for reason in _find_faults(call, calls[0]):
            raise ValueError(f"{name}, layer {call.layer}: {reason}")
    last = min(int(decoder.text.max_position_embeddings), _FARTHEST)
    return tuple((call, _read_window(call, last, name)) for call in calls)


def _run_once(decoder: Decoder, name: str) -> list[AttentionCall]:
    """Run base and head on the meta device.   raises: ValueError"""
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    model, experts = decoder.model, decoder.model.get_experts_implementation()
    token = CALLS.set(CallList())
    try:
        model.set_experts_implementation(PROBED)
        with torch.inference_mode():
            # With a mask of its own transformers does not look for packed sequences, which would
            # read positions. Some models look whether it shows all, so it has numbers.
            hidden = decoder.base(
                input_ids=tokens,
                position_ids=tokens,
                attention_mask=torch.ones(1, _TOKENS, dtype=torch.int64),
                use_cache=False,
            ).last_hidden_state
            scores = decoder.head(inputs_embeds=hidden, use_cache=False).logits
        calls = CALLS.get().calls
    except Exception as error:
        raise ValueError(f"{name} {_explain(error)}") from error
    finally:
        CALLS.reset(token)
        model.set_experts_implementation(experts)
    if tuple(scores.shape[:2]) != (1, _TOKENS):
        raise ValueError(f"{name} gives scores of the shape {list(scores.shape)}")
    return calls


def _explain(error: Exception) -> str:
    """Why the modules cannot run over what stands for masks and for hidden states."""
    text = in_one_line(error)
    if MaskFunction.__name__ in text:
        return "computes with its mask outside attention"
    if GivenStates.__name__ in text:
        return "has a head that reaches into the decoder"
    # What cannot be done without numbers: read one, copy them, or count those that a mask selects.
    if re.search(r"\bmeta (tensor|backend|device)|on meta\b|data-dependent", text):
        return (
            f"reads numbers on the host{_find_place(error)}, so its attention cannot be looked at"
        )
    return f"cannot be probed: {text}"


def _find_place(error: Exception) -> str:
    """The class of the innermost module that ran, in words; empty where none is known."""
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [type(each).__name__ for each in frames if isinstance(each, nn.Module)]
    return f" in {modules[-1]}" if modules else ""


def _find_faults(call: AttentionCall, first: AttentionCall) -> Iterator[str]:
    """Say why pages cannot serve the call."""
    if call.strange:
        yield f"attention gets {', '.join(call.strange)}, which no backend is told"
    if not call.is_causal:
        yield "attention is not causal"
    if call.scale is None:
        yield "the scale of attention is not one number"
    if call.values[-1] > call.keys[-1]:
        yield "values are wider than keys"
    if _sizes(call) != _sizes(first):
        yield "heads or widths differ from those of layer 0"


def _sizes(call: AttentionCall) -> tuple[int, ...]:
    """Heads and widths."""
    return call.queries[1], call.keys[1], call.keys[-1], call.values[-1]


def _read_window(call: AttentionCall, last: int, name: str) -> int | None:
    """How many latest tokens the layer sees; None for all.   raises: ValueError

    last: positions to look at
    """
    seen = None if call.mask is None else _read_mask(call, last, name)
    told = call.window if call.window is not None and call.window < last else None
    if call.mask is not None and told is not None and seen != told:
        raise ValueError(
            f"{name}, layer {call.layer}: its mask shows {seen or 'all'} tokens, and its call "
            f"says {told}"
        )
    return seen if call.mask is not None else told


def _read_mask(call: AttentionCall, last: int, name: str) -> int | None:
    """What the mask shows of the positions before `last`.   raises: ValueError"""
    assert call.mask is not None
    keys, zero, shown = torch.arange(last), torch.tensor(0), set()
    for query in sorted({last - 1, last - 2, last - 3, last // 2, last // 3, 0}):
        try:
            row = call.mask.function(zero, zero, torch.tensor(query), keys)
            row = torch.as_tensor(row).expand(last).bool()
        except Exception as error:
            raise ValueError(
                f"{name}, layer {call.layer}: its mask cannot be read: {in_one_line(error)}"
            ) from error
        count = int(row.sum())
        if not count or not bool(row[query - count + 1 : query + 1].all()):
            raise ValueError(f"{name}, layer {call.layer}: its mask is neither causal nor a window")
        # A query at the beginning sees all, window or not.
        shown.add(count if count <= query else None)
    windows = shown - {None}
    if len(windows) > 1:
        raise ValueError(f"{name}, layer {call.layer}: its mask changes with the position")
    return next(iter(windows), None)
