"""The spec of `shortest-job`."""

from headstock.spi import SchedulerSpec, SpiRange


def spec() -> SchedulerSpec:
    """A scheduler has no capabilities to claim: it serves any model on any device."""
    return SchedulerSpec(
        name="shortest-job",
        spi=SpiRange(0, 3),
        summary="runs what has the least work left",
        implementation="headstock_shortest_job.schedule:schedule",
    )
