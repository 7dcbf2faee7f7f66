"""The spec of `fair-share`."""

from headstock.spi import SchedulerSpec, SpiRange


def spec() -> SchedulerSpec:
    """A scheduler has no capabilities to claim: it serves any model on any device."""
    return SchedulerSpec(
        name="fair-share",
        spi=SpiRange(0, 3),
        summary="gives users equal shares of each step",
        implementation="headstock_fair_share.schedule:schedule",
    )
