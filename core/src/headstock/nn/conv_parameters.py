"""Parameters of a gated convolution over the latest tokens."""

from __future__ import annotations

from torch import Tensor

from headstock.nn.param_specs import NamedSpecs, first_shard_transform, make_linear_specs
from headstock.spi import LayerConfig, ModelConfig, ParamSpec, ShortConv


def make_conv_specs(
    config: ModelConfig, layer: LayerConfig, conv: ShortConv, sources: tuple[str, str, str]
) -> NamedSpecs:
    """Parameters of a gated convolution: the gate before, the one after and its input merged.

    sources: the names in the checkpoint of what makes these, of the convolution, and of the output
    """
    prefix, width = layer.prefix, conv.width
    made, convolved, output = sources
    yield from make_linear_specs(
        f"{prefix}conv_in",
        config.hidden,
        (made,),
        (width,) * 3,
        conv.bias,
    )
    yield (
        f"{prefix}conv",
        ParamSpec(
            shape=(conv.taps, width),
            sources=((f"{convolved}.weight",),),
            source_shape=(width, 1, conv.taps),
            transform=by_tap,
        ),
    )
    if conv.bias:
        yield (
            f"{prefix}conv.bias",
            ParamSpec(shape=(width,), sources=((f"{convolved}.bias",),)),
        )
    yield from make_linear_specs(
        f"{prefix}conv_out",
        width,
        (output,),
        (config.hidden,),
        conv.bias,
        bias_transform=first_shard_transform(config),
    )


def by_tap(weight: Tensor) -> Tensor:
    """A convolution's weight with a row for each tap.   weight: [width, 1, taps]"""
    return weight[:, 0].t().contiguous()
