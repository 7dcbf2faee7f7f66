"""Small distributions that are each broken in one way, and one that is sound.

`python broken_plugins.py FOLDER` builds their wheels.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from attrs import field, frozen

SPEC = """
from headstock.spi import SchedulerSpec, SpiRange

def spec():
    return SchedulerSpec(name={name!r}, spi=SpiRange({version}), summary="test",
    implementation={path!r}{more})
"""


@frozen(kw_only=True)
class Dist:
    """A distribution with one plugin.

    `module` is the text of its only module; `extras` maps names to requirements.
    """

    name: str
    plugin: str
    module: str
    kind: str = "scheduler"
    extras: Mapping[str, str] = field(factory=dict)

    @property
    def package(self) -> str:
        """The import name."""
        return self.name.replace("-", "_")


def scheduler_module(
    name: str, *, version: str = "0, 3", path: str = "json:loads", more: str = ""
) -> str:
    """A module whose `spec` returns a SchedulerSpec."""
    return SPEC.format(name=name, version=version, path=path, more=more)


NEEDS_KERNELS = """, requires=(
    Require(import_name="no_such_kernels", distribution="no-such-kernels", version=">=2",
    hint="pip install kernels"),
)"""
NEEDS_EITHER = """, requires=(Require(import_name="any", distribution="any", any_of=(
    Require(import_name="no_such_kernels", distribution="no-such-kernels"),
    Require(import_name="attrs", distribution="attrs", version=">=9999"),
)),)"""
KERNELLESS = """
from headstock.spi import *
def spec():
    return AttentionSpec(
        name="kernelless", spi=SpiRange(0, 3), summary="test",
        implementation="no_such_kernels:Backend",
        requires=(Require(import_name="no_such_kernels", distribution="no-such-kernels",
        hint="pip install kernels"),),
        capabilities=AttentionCapabilities(
            phases=frozenset(Phase), devices=(DeviceRange("cpu"),),
            dtypes=frozenset({("float32",) * 3}),
            layouts=frozenset(LayoutKind),
            head_dims=IntSet.all(), gqa_ratios=IntSet.all(), page_sizes=IntSet.all(),
            mixed_groups=True, paged=True,
            contiguous=True,
            graph=GraphSupport.NEVER, planning=Planning.NONE, features=frozenset(),
        ),
    )
"""
LOST_A_NAME = "from headstock.spi import Choice\n"
OLD = scheduler_module("ancient", version="0, 1")
IMPORT = "from headstock.spi import Require\n"

DISTS = (
    Dist(name="sound-plugin", plugin="sound", module=scheduler_module("sound")),
    Dist(
        name="raises-import-error", plugin="import-error", module="import no_such_module_anywhere\n"
    ),
    Dist(
        name="raises-assertion",
        plugin="assertion",
        module="assert 1 + 1 == 3, 'arithmetic is off'\n",
    ),
    Dist(
        name="raises-system-exit", plugin="system-exit", module="raise SystemExit('left early')\n"
    ),
    Dist(
        name="raises-when-called",
        plugin="when-called",
        module="def spec():\n    raise KeyError('lost')\n",
    ),
    Dist(name="has-no-spec", plugin="no-spec", module="other = 1\n"),
    Dist(
        name="wrong-type",
        plugin="wrong-type",
        module="def spec():\n    return {'name': 'wrong-type'}\n",
    ),
    Dist(name="wrong-name", plugin="wrong-name", module=scheduler_module("another")),
    Dist(name="twin-first", plugin="twin", module=scheduler_module("twin")),
    Dist(name="twin-second", plugin="twin", module=scheduler_module("twin")),
    Dist(
        name="from-the-future",
        plugin="future",
        module=scheduler_module("future", version="99, 0"),
    ),
    Dist(name="next-edition", plugin="next", module=scheduler_module("next", version="0, 4")),
    Dist(name="next-revision", plugin="later", module=scheduler_module("later", version="0, 3, 9")),
    Dist(name="from-the-past", plugin="past", module=scheduler_module("past", version="0, 2")),
    # It fails before its spec says the version: names and fields of 0.1 are gone.
    Dist(name="lost-a-name", plugin="ancient", module=LOST_A_NAME + OLD),
    Dist(
        name="lost-a-field",
        plugin="antique",
        module=scheduler_module("antique", version="0, 1", more=", color='red'"),
    ),
    Dist(
        name="needs-kernels",
        plugin="needy",
        module=IMPORT + scheduler_module("needy", more=NEEDS_KERNELS),
    ),
    Dist(
        name="needs-either",
        plugin="choosy",
        module=IMPORT + scheduler_module("choosy", more=NEEDS_EITHER),
    ),
    Dist(name="no-kernels", plugin="kernelless", module=KERNELLESS, kind="attention"),
    Dist(
        name="breaks-late",
        plugin="late",
        module=scheduler_module("late", path="breaks_late_inside:choose"),
    ),
)

MISMATCHED = ("future", "next", "later", "past", "ancient", "antique")
"""Plugins that were made for another version of the contract."""


def write_installed(folder: Path, dists: tuple[Dist, ...] = DISTS) -> None:
    """Write the distributions to `folder` as an installer leaves them."""
    for dist in dists:
        (folder / f"{dist.package}.py").write_text(dist.module)
        info = folder / f"{dist.package}-1.0.dist-info"
        info.mkdir(parents=True)
        extras = [
            f"Requires-Dist: {need}; extra == '{extra}'\n" for extra, need in dist.extras.items()
        ]
        head = f"Metadata-Version: 2.1\nName: {dist.name}\nVersion: 1.0\n"
        (info / "METADATA").write_text(head + "".join(extras))
        (info / "entry_points.txt").write_text(
            f"[headstock.{dist.kind}]\n{dist.plugin} = {dist.package}:spec\n"
        )


def build_wheel(folder: Path, dist: Dist) -> None:
    """Build the distribution's wheel into `folder`, which needs hatchling."""
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        (project / f"{dist.package}.py").write_text(dist.module)
        (project / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
            f'[project]\nname = "{dist.name}"\nversion = "1.0"\n'
            f'[project.entry-points."headstock.{dist.kind}"]\n{dist.plugin} = '
            f'"{dist.package}:spec"\n[tool.hatch.build.targets.wheel]\ninclude = '
            f'["{dist.package}.py"]\n'
        )
        command = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            "wheel",
            "-d",
            str(folder.absolute()),
        ]
        subprocess.run(command, cwd=project, check=True, timeout=600)


if __name__ == "__main__":
    for broken in DISTS:
        build_wheel(Path(sys.argv[1]), broken)
