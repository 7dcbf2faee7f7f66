"""The options of `flex`."""

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class FlexOptions:
    """compile: whether kernels are compiled; `auto` does so on CUDA alone, since a CPU would wait
    half a minute for the first of them
    """

    compile: Literal["auto", "on", "off"] = "auto"
