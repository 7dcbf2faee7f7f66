"""The documentation says what is there, and what it says to type can be typed."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from source_tree import PLUGINS, ROOT, read_groups

from headstock import registry
from headstock.cli.main import VERBS, main
from headstock.spi import RESERVED, SPI

README = ROOT / "README.md"
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "tests/*.md", "[!.]*/*/README.md")
    for page in ROOT.glob(pattern)
)
SAMPLE_COMMANDS = ("perplexity",)
"""Commands of plugins that a page tells to write."""
DIMENSIONS = (
    "tokens rows layers heads kv_heads head_dim hidden vocab pages page_size experts groups".split()
)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(page: Path, program: str) -> list[str]:
    """The lines of a page, indented or fenced as code, that begin with a program's name."""
    lines, fenced = [], False
    for line in page.read_text().splitlines():
        fenced ^= line.startswith("```")
        if fenced or line.startswith("    "):
            lines.append(line.strip().removeprefix("$ "))
    return [line for line in lines if line.startswith(f"{program} ")]


def headings(page: Path) -> list[str]:
    return [line.lstrip("# ") for line in page.read_text().splitlines() if line.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    plain = [re.sub(r"[^\w\- ]", "", line.lower()) for line in headings(page)]
    return {line.replace(" ", "-") for line in plain}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_link_into_a_page_leads_to_a_heading(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s:]*\.md)?#([^)\s]+)\)", page.read_text())
    assert [
        (path, anchor)
        for path, anchor in targets
        if anchor not in anchors(page.parent / path if path else page)
    ] == []


def test_the_readme_has_the_two_commands() -> None:
    nox = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox"
    assert [line for line in commands(README, "python3") if "nox" in line] == [
        f'{nox} -s run -- --prompt "Once upon a time"',
        nox,
    ]


def test_what_the_install_page_installs_of_headstock_comes_from_the_checkout() -> None:
    page = ROOT / "docs" / "install.md"
    lines = [line for line in commands(page, "pip") if "headstock" in line or "wheels/" in line]
    assert len(lines) >= 3
    files = ("-r wheels/all.txt", "-r wheels/serve.txt", "-c wheels/ours.txt")
    assert [line for line in lines if not any(each in line for each in files)] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_headstock_command_has_a_verb_and_flags_that_exist(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verbs = {*VERBS, *(plugin.name for plugin in registry.list_installed("command"))}
    for command in commands(page, "headstock"):
        words = list(
            itertools.takewhile(lambda word: not word.startswith("-"), command.split()[1:])
        )
        assert words[0] in {*verbs, *SAMPLE_COMMANDS}, command
        if words[0] in SAMPLE_COMMANDS:
            continue  # which test_command_plugin.py installs and runs
        assert main([*words, "--help", "all"]) == 0
        known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
        assert [
            flag for flag in re.findall(r"(?<=\s)--[a-z][a-z-]*", command) if flag not in known
        ] == [], command


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_nox_session_named_exists(page: Path) -> None:
    defined = set(
        re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    )
    named = re.findall(r"nox -s '?(\w+)", page.read_text())
    assert [name for name in named if name not in defined] == []


def test_the_glossary_has_every_dimension_word() -> None:
    rows = re.findall(r"^\| (\w+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert [word for word in DIMENSIONS if word not in rows] == []


def test_every_entry_point_group_has_a_heading_and_every_reserved_one_is_named() -> None:
    page = ROOT / "docs" / "plugins.md"
    assert [kind for kind in SPI if f"`headstock.{kind}`" not in headings(page)] == []
    assert [kind for kind in RESERVED if f"`headstock.{kind}`" not in page.read_text()] == []


@pytest.mark.parametrize("member", PLUGINS, ids=relative)
def test_every_member_has_a_readme_that_says_what_it_provides(member: Path) -> None:
    groups = read_groups(member)
    text = (member / "README.md").read_text()
    assert [name for group in groups.values() for name in group if name not in text] == []


def test_the_hooks_before_a_commit_have_the_version_of_ruff_that_checks_it_later() -> None:
    (pinned,) = re.findall(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"ruff==([^\s\"]+)", hooks)) == {pinned}


def test_hosted_ci_runs_what_any_clone_runs() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"- run: (.*)", workflow) == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
