"""The entry point of `trtllm`."""

from __future__ import annotations

from attrs import evolve

from headstock.spi import (
    AttentionCapabilities,
    AttentionQuery,
    AttentionSpec,
    DeviceEnv,
    DeviceRange,
    GraphSupport,
    IntSet,
    LayoutKind,
    Phase,
    Planning,
    Rejection,
    Require,
    SpiRange,
)
from headstock_trtllm import toolchain

DISTRIBUTION = "flashinfer-python"
REQUIRE = Require(
    import_name="flashinfer", distribution=DISTRIBUTION, version=">=0.6.18.post1,<0.8"
)

HOPPER = DeviceRange("cuda", (9, 0), (9, 0))
BLACKWELL = DeviceRange("cuda", (10, 0), (10, 3))

CLAIMED_HEAD_DIMS = (64, 128, 256)
BFLOAT16 = ("bfloat16", "bfloat16", "bfloat16")
FLOAT16 = ("float16", "float16", "float16")
EIGHT_BIT_KV = ("bfloat16", "float8_e4m3fn", "bfloat16")

CAPABILITIES = AttentionCapabilities(
    phases=frozenset(Phase),
    devices=(HOPPER, BLACKWELL),
    dtypes=frozenset({BFLOAT16, FLOAT16, EIGHT_BIT_KV}),
    layouts=frozenset({LayoutKind.FULL}),
    head_dims=IntSet.of(*CLAIMED_HEAD_DIMS),
    gqa_ratios=IntSet.multiples(1, 32),
    page_sizes=IntSet.of(16, 32, 64, 128),
    mixed_groups=False,
    paged=True,
    # A contiguous region is one page as long as the longest sequence (decision 0008), and pages
    # have four sizes here.
    contiguous=False,
    graph=GraphSupport.DECODE,
    planning=Planning.NONE,
    # XQA's module does not support a soft-cap, and neither kernel returns an LSE for merging.
    features=frozenset(),
)


def spec() -> AttentionSpec:
    """The spec of `trtllm`: both GPU families; `resolve` narrows it to the present one."""
    return AttentionSpec(
        name="trtllm",
        spi=SpiRange(0, 3),
        summary="TensorRT-LLM's kernels from FlashInfer, for Hopper and Blackwell",
        implementation="headstock_trtllm.backend:TrtllmBackend",
        requires=(REQUIRE,),
        resolve="headstock_trtllm.plugin:resolve",
        capabilities=CAPABILITIES,
    )


def resolve(query: AttentionQuery, env: DeviceEnv) -> AttentionCapabilities | tuple[Rejection, ...]:
    """The capabilities on this machine and for these phases, or why the query cannot be met."""
    if DISTRIBUTION not in env.distributions:
        hint = f"pip install '{DISTRIBUTION}{REQUIRE.version}'"
        return (Rejection(code="missing", message=f"{DISTRIBUTION} is not installed", hint=hint),)
    if env in BLACKWELL:
        return blackwell(query)
    return hopper(query)


def hopper(query: AttentionQuery) -> AttentionCapabilities | tuple[Rejection, ...]:
    """FMHA v2 for prompts and XQA for decode: the types of both, or of XQA for decode alone."""
    if not toolchain.has_kernels():
        return (
            Rejection(
                code="missing",
                message="its kernels are compiled at their first use, and no nvcc was found",
                hint="Install the CUDA toolkit, and set CUDA_HOME where it is in no usual place.",
            ),
        )
    group = query.groups[0]  # one shape for all: no mixed groups are claimed
    if query.phases <= {Phase.DECODE} or group.q_dtype == group.kv_dtype == "bfloat16":
        dtypes = CAPABILITIES.dtypes if query.phases <= {Phase.DECODE} else frozenset({BFLOAT16})
        return evolve(CAPABILITIES, dtypes=dtypes)
    reason = (
        "FMHA v2 adds the products of float16 in float16"
        if group.q_dtype == "float16"
        else f"FMHA v2 reads {group.kv_dtype} KV with queries of that type only"
    )
    return (
        Rejection(
            code="dtype",
            message=f"{reason}, so prompts are served in bfloat16 with bfloat16 KV",
            hint="Set attn (--attn) to fi,trtllm, or dtype (--dtype) and kv_dtype (--kv-dtype) to "
            "bfloat16.",
        ),
    )


def blackwell(query: AttentionQuery) -> AttentionCapabilities | tuple[Rejection, ...]:
    """The kernels of trtllm-gen, which are only precompiled for some shapes."""
    capabilities = evolve(
        CAPABILITIES,
        dtypes=frozenset({BFLOAT16, FLOAT16}),
        head_dims=IntSet.of(64, 128),
        page_sizes=IntSet.of(16, 32, 64),
    )
    if query.page_size is not None and query.page_size not in capabilities.page_sizes:
        message = f"trtllm-gen reads pages of {capabilities.page_sizes}, not {query.page_size}"
        return (
            Rejection(
                code="page_size", message=message, hint=("Set page_size (--page-size) to 64.")
            ),
        )
    return capabilities
