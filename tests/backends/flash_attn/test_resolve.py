"""What is left of `fa` on machines of several kinds, each provider present and absent."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
from attrs import evolve

from headstock import registry
from headstock.errors import CannotRun
from headstock.selection.capabilities import resolve_capabilities as resolved
from headstock.spi import (
    AttentionCapabilities,
    DeviceEnv,
    Feature,
    GraphSupport,
    IntSet,
    Phase,
    Planning,
    Require,
)
from headstock_conformance.attention import QUERY, query
from headstock_fa.plugin import EIGHT_BIT_KV, resolve, spec
from headstock_fa.providers import PROVIDERS, choose_provider, installed_versions, major_minor

A100, H200, B200, T4 = (
    DeviceEnv(device="cuda", capability=capability)
    for capability in ((8, 0), (9, 0), (10, 0), (7, 5))
)
FA3, VLLM, FA2, TORCH = (
    {"flash_attn_3": "3.0.1"},
    {"vllm": "0.24.0"},
    {"flash_attn": "2.8.3"},
    {"torch": "2.13.0"},
)

TABLE = [
    (H200, FA3 | VLLM | FA2 | TORCH, "flash_attn_interface"),
    (H200, VLLM | FA2 | TORCH, "vllm"),
    (H200, {"torch": "2.11.0+cu130"} | VLLM, "vllm"),
    (H200, FA2 | TORCH, "flash_attn"),
    (H200, TORCH, "torch"),
    (H200, {"torch": "2.11.0+cu130"}, None),
    (H200, {"vllm": "0.9.2", "flash-attn": "2.5.1"}, None),
    (A100, FA3 | VLLM | FA2 | TORCH, "flash_attn"),
    (A100, FA3 | VLLM | TORCH, "torch"),
    (A100, FA3 | VLLM, None),
    (B200, FA3 | VLLM | FA2, "flash_attn"),
    (B200, FA3 | VLLM, None),
    (H200, {}, None),
]


@pytest.mark.parametrize(("env", "distributions", "name"), TABLE)
def test_the_first_provider_that_serves_is_used(
    env: DeviceEnv, distributions: dict[str, str], name: str | None
) -> None:
    env = evolve(env, distributions=distributions)
    provider, passed = choose_provider(env)
    assert (provider and provider.name) == name
    answer = resolve(QUERY, env)
    if provider is None:
        assert len(passed) == len(PROVIDERS)
        (reason,) = answer
        assert reason.code == "provider" and all(each in reason.message for each in passed)
        assert "pip install" in reason.hint
    else:
        assert isinstance(answer, AttentionCapabilities)
        assert (64 in answer.page_sizes) == answer.contiguous == (provider.generation == 3)
        assert 256 in answer.page_sizes and 512 in answer.page_sizes
        assert answer.features == provider.features <= spec().capabilities.features
        assert (answer.graph is GraphSupport.ALWAYS) == (name == "vllm")


@pytest.mark.parametrize("distributions", [FA2, TORCH])
def test_a_page_size_that_the_provider_cannot_read_is_refused_by_its_name(
    distributions: dict[str, str],
) -> None:
    env = evolve(H200, distributions=distributions)
    (reason,) = resolve(query(page_size=64), env)
    assert reason.code == "page_size" and "multiples of 256, not 64" in reason.message
    assert "FlashAttention-2" in reason.message
    assert (
        "page_size (--page-size) to 256" in reason.hint
        and "vllm" in reason.hint
        and "torch" not in reason.hint
    )
    assert isinstance(resolve(query(page_size=512), env), AttentionCapabilities)
    with pytest.raises(CannotRun, match=r"attn \(--attn\) fa cannot serve .*multiples of 256"):
        resolved(spec(), query(page_size=64), env)


def test_a_soft_cap_needs_a_provider_that_has_one() -> None:
    asked = query(features=frozenset({Feature.SOFTCAP}))
    (reason,) = resolve(asked, evolve(H200, distributions=TORCH))
    assert (
        reason.code == "feature"
        and "torch" in reason.message
        and "another backend by attn (--attn)" in reason.hint
    )
    assert isinstance(
        resolve(asked, evolve(H200, distributions=TORCH | VLLM)), AttentionCapabilities
    )


@pytest.mark.feature("S15")
def test_without_a_gpu_or_a_provider_the_reason_says_so() -> None:
    with pytest.raises(
        CannotRun,
        match=r"it runs on cuda from sm_80, and this is cpu\. Set attn \(--attn\) to sdpa",
    ):
        resolved(spec(), QUERY, DeviceEnv(device="cpu", distributions=VLLM))
    with pytest.raises(CannotRun, match="this is cuda sm_75"):
        resolved(spec(), QUERY, evolve(T4, distributions=VLLM))
    with pytest.raises(
        CannotRun, match="no FlashAttention serves here: flash-attn-3 is not installed"
    ):
        resolved(spec(), QUERY, H200)


@pytest.mark.feature("S15")
def test_what_is_missing_comes_with_what_to_install() -> None:
    absent = tuple(evolve(each, import_name="no_such_module") for each in spec().requires[0].any_of)
    with pytest.raises(
        CannotRun,
        match=r"fa.*needs one of several: flash-attn-3 is not installed.*pip install 'vllm",
    ):
        registry.require_installed(
            evolve(spec(), requires=(evolve(spec().requires[0], any_of=absent),))
        )
    assert isinstance(spec().requires[0], Require)


def test_the_spec_claims_what_the_kernels_can_do() -> None:
    claims = spec().capabilities
    assert claims.phases == set(Phase)
    assert claims.graph is GraphSupport.ALWAYS and claims.planning is Planning.NONE
    assert claims.head_dims == IntSet.multiples(8, 256)
    wide = {(dtype,) * 3 for dtype in ("bfloat16", "float16")}
    assert claims.dtypes == wide | {EIGHT_BIT_KV}
    for distributions, eight_bit in ((VLLM, {EIGHT_BIT_KV}), (FA2, set()), (TORCH, set())):
        assert resolve(QUERY, evolve(H200, distributions=distributions)).dtypes == wide | eight_bit


@pytest.mark.parametrize(
    ("head_dim", "served"), [(16, True), (40, False), (72, False), (128, True)]
)
def test_8_bit_kv_needs_heads_of_multiples_of_16(head_dim: int, served: bool) -> None:
    asked = query(head_dim=head_dim, kv_dtype="float8_e4m3fn", q_dtype="bfloat16")
    env = evolve(H200, distributions=VLLM)
    assert (head_dim in resolve(asked, env).head_dims) == served
    assert head_dim in resolve(query(head_dim=head_dim), env).head_dims


def test_what_was_found_is_part_of_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = VLLM | {"torch": "2.13.0"}
    monkeypatch.setattr("headstock_fa.plugin.installed_versions", lambda: versions)
    assert spec().summary.endswith("found here: vllm 0.24.0 (FA3), torch 2.13.0 (FA2)")
    monkeypatch.setattr(
        "headstock_fa.plugin.installed_versions", lambda: VLLM | {"torch": "2.11.0"}
    )
    assert spec().summary.endswith("found here: vllm 0.24.0 (FA3)"), (
        "torch 2.11 has no FA2 over pages"
    )
    monkeypatch.setattr("headstock_fa.plugin.installed_versions", dict)
    assert spec().summary.endswith("found here: none")


@pytest.mark.parametrize(
    ("build", "found"), [("2.13.0+cpu", {}), ("2.13.0+cu130", {"torch": "2.13.0+cu130"})]
)
def test_installed_names_distributions_with_kernels(
    build: str, found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name != "torch":
            raise PackageNotFoundError(name)
        return build

    monkeypatch.setattr("headstock_fa.providers.version", version)
    assert installed_versions() == found


def test_versions_are_compared_by_their_first_two_numbers() -> None:
    assert [major_minor(each) for each in ("2.13.0+cu130", "3.0.0b1", "10", "0.24rc1")] == [
        (2, 13),
        (3, 0),
        (10, 0),
        (0, 24),
    ]
