"""Where FlashAttention comes from. Importing this imports neither torch nor a kernel library."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from attrs import frozen

from headstock.spi import DeviceEnv, DeviceRange, Feature, GraphSupport, Require

FA3_HINT = "pip install 'vllm>=0.20'"
TORCH_HINT = "pip install 'torch>=2.13'"
FA2_FEATURES = frozenset({Feature.SLIDING_WINDOW, Feature.SOFTCAP, Feature.LSE, Feature.SINKS})
# Only these have been measured: FlashAttention-2 reads pages of multiples of 256 tokens, which few
# prompts can share.
ALL_FEATURES = FA2_FEATURES | {Feature.SHARED_PREFIX}


@frozen(kw_only=True)
class Provider:
    """A library with paged FlashAttention.

    - `generation`: 3 reads pages of any size, 2 of multiples of 256 only
    - `least`: the first version known to work; `require` says the same as text
    - `loader`: the function of `kernels` that loads it
    - `graph`: ALWAYS where the library writes to the tensor it is given, and nothing for tokens
      that no row has. Other data there would reach the tokens that pad a graph.
    """

    name: str
    generation: int
    require: Require
    least: tuple[int, int]
    devices: DeviceRange
    features: frozenset[Feature]
    graph: GraphSupport
    loader: str

    @property
    def page_step(self) -> int:
        """Page sizes must be multiples of this."""
        return 1 if self.generation == 3 else 256


PROVIDERS = (
    Provider(
        name="flash_attn_interface",
        generation=3,
        require=Require(import_name="flash_attn_interface", distribution="flash-attn-3"),
        least=(3, 0),
        devices=DeviceRange("cuda", (9, 0), (9, 0)),
        features=ALL_FEATURES,
        graph=GraphSupport.DECODE,
        loader="load_interface",
    ),
    Provider(
        name="vllm",
        generation=3,
        require=Require(import_name="vllm", distribution="vllm", version=">=0.20", hint=FA3_HINT),
        least=(0, 20),
        devices=DeviceRange("cuda", (9, 0), (9, 0)),
        features=ALL_FEATURES,
        graph=GraphSupport.ALWAYS,
        loader="load_vllm",
    ),
    Provider(
        name="flash_attn",
        generation=2,
        require=Require(import_name="flash_attn", distribution="flash-attn", version=">=2.7"),
        least=(2, 7),
        devices=DeviceRange("cuda", (8, 0)),
        features=FA2_FEATURES,
        graph=GraphSupport.DECODE,
        loader="load_flash_attn",
    ),
    Provider(
        name="torch",
        generation=2,
        require=Require(
            import_name="torch", distribution="torch", version=">=2.13", hint=TORCH_HINT
        ),
        least=(2, 13),
        devices=DeviceRange("cuda", (8, 0)),
        features=FA2_FEATURES - {Feature.SOFTCAP},
        graph=GraphSupport.DECODE,
        loader="load_torch",
    ),
)
"""In order of preference: the first that is installed and serves the device is used."""

REQUIRE = Require(
    import_name="flash_attn",
    distribution="flash-attn",
    hint=f"{TORCH_HINT}, or on Hopper for FlashAttention-3 {FA3_HINT}",
    any_of=tuple(provider.require for provider in PROVIDERS),
)


def installed_versions() -> dict[str, str]:
    """Distribution -> version of each installed provider; torch's CPU builds do not count."""
    versions = {}
    for provider in PROVIDERS:
        try:
            versions[provider.require.distribution] = version(provider.require.distribution)
        except PackageNotFoundError:
            continue
    # Only torch's CUDA builds have FlashAttention.
    return {name: number for name, number in versions.items() if not number.endswith("+cpu")}


def choose_provider(env: DeviceEnv) -> tuple[Provider | None, tuple[str, ...]]:
    """The installed provider to use, and the reason why each one before it was skipped."""
    rejections = []
    for provider in PROVIDERS:
        number = env.distributions.get(provider.require.distribution)
        if number is None:
            rejections.append(f"{provider.require.distribution} is not installed")
        elif major_minor(number) < provider.least:
            rejections.append(
                f"{provider.require.distribution}: expected {provider.require.version}, got "
                f"{number}"
            )
        elif env not in provider.devices:
            rejections.append(
                f"{provider.require.distribution} {number} serves {provider.devices}, and this is "
                f"{env}"
            )
        else:
            return provider, tuple(rejections)
    return None, tuple(rejections)


def major_minor(number: str) -> tuple[int, int]:
    """The first two numbers of a version: (2, 13) of "2.13.0+cu130"."""
    major, minor, *_ = [*map(int, re.findall(r"\d+", number)), 0, 0]
    return major, minor
