"""`headstock doctor`."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headstock import registry
from headstock.cli import doctor as verb
from headstock.cli.doctor import print_findings
from headstock.cli.main import main
from headstock.config import EngineConfig
from headstock.doctor import (
    Finding,
    Status,
    check_parts,
    machine_checks,
    plugin_checks,
    run_checks,
    software_checks,
)
from headstock.doctor.finding import fail_finding, pass_finding, run_check, warn_finding
from headstock.errors import AmbiguousPlugin, PluginBroken
from headstock.registry import InstalledPlugin
from headstock.spi import OpsCapabilities, OpsSpec, Require, SpiRange


def statuses(findings: list[Finding]) -> dict[str, str]:
    """Subject -> status."""
    return {finding.subject: finding.status.value for finding in findings}


def test_a_check_that_breaks_off_keeps_what_it_found() -> None:
    def check() -> Iterator[Finding]:
        yield pass_finding("first", "fine")
        raise SystemExit(3)

    findings = run_check("second", check)
    assert statuses(findings) == {"first": "PASS", "second": "FAIL"}
    assert "SystemExit" in findings[1].text


def test_one_failing_check_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> Iterator[Finding]:
        raise OSError("no such thing")
        yield

    monkeypatch.setattr(machine_checks, "check_memory", broken)
    monkeypatch.setattr(plugin_checks, "check_plugins", broken)
    findings = statuses(list(run_checks(EngineConfig(model="no-such-model"))))
    assert findings["memory"] == findings["plugins"] == findings["model no-such-model"] == "FAIL"
    assert {"python", "torch", "encoding"} <= set(findings)


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([pass_finding("a", "b")], 0),
        ([warn_finding("a", "b", "c")], 0),
        ([pass_finding("a", "b"), fail_finding("a", "b", "")], 5),
    ],
)
def test_the_exit_code_is_5_when_something_failed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    findings: list[Finding],
    code: int,
) -> None:
    monkeypatch.setattr(verb, "run_checks", lambda config: iter(findings))
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.count("\n") == len(findings) + 1
    assert main(["doctor", "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert [finding["status"] for finding in printed] == [
        finding.status.value for finding in findings
    ]
    assert set(printed[0]) == {"status", "subject", "text", "hint", "code"}


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "no-such-model"],
        ["--model", "demoo"],
        ["--model", "no/such/model"],
        ["--attn", "nope"],
        ["--attn", "sdpa", "--page-size", "16", "--ops", "nope"],
        ["--device", "cpu", "--attn", "fi"],
        ["--model", "owner/name"],
        ["--model", "https://huggingface.co/owner/name"],
        ["--model", "no-such-model", "--device", "cuda"],
    ],
)
def test_the_exit_code_is_that_of_run_with_the_same_flags(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library reads its environment when it is imported, which another test may have done.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    codes = [
        main([*verb, *flags])
        for verb in (["doctor"], ["doctor", "--json"], ["run", "--quiet", "--prompt", "x"])
    ]
    assert codes[0] and len(set(codes)) == 1, codes


def test_hints_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [warn_finding("nvcc", "not found", "install it")]
    assert print_findings(iter(findings)) == findings
    assert (
        "WARN  nvcc                       not found  (install it)\n0 PASS, 1 WARN, 0 FAIL"
        in capsys.readouterr().out
    )


def spec(**changes: object) -> OpsSpec:
    """The spec of an ops plugin."""
    given = {
        "name": "odd",
        "spi": SpiRange(0, 3),
        "summary": "odd",
        "implementation": "json:loads",
        "capabilities": OpsCapabilities(devices=(), dtypes=frozenset(), layouts=frozenset()),
    }
    return OpsSpec(**(given | changes))  # type: ignore[arg-type]


ODD = InstalledPlugin(
    kind="ops", name="odd", distribution="odd-ops", version="1.0", target="odd:spec", status="ok"
)


@pytest.mark.feature("S15")
def test_plugins_pass_lack_kernels_or_are_broken() -> None:
    def status(outcome: object) -> list[tuple[str, str]]:
        return [
            (finding.status.value, finding.hint)
            for finding in plugin_checks.check_plugin(ODD, outcome, registry.find_missing)
        ]

    need = Require(
        import_name="no_such_kernels",
        distribution="no-such-kernels",
        hint="pip install no-such-kernels",
    )
    assert status(spec()) == [("PASS", "")]
    assert status(spec(requires=(need,))) == [("WARN", "pip install no-such-kernels")]
    assert status(PluginBroken("it fell apart")) == [
        ("FAIL", "repair it or remove it: pip uninstall odd-ops")
    ]
    assert status(AmbiguousPlugin("choose with odd-ops:odd or even-ops:odd")) == [("FAIL", "")]


@pytest.mark.feature("S15")
def test_a_backend_that_cannot_run_here_is_a_warning_with_the_reason_and_the_next_move() -> None:
    all_found = list(check_parts(EngineConfig(device="cpu")))
    findings = {finding.subject: finding for finding in all_found}
    assert len(findings) == len(all_found)
    # A library would not help where there is no GPU. Ray is one that any machine may lack.
    assert [finding.subject for finding in all_found if "pip install" in finding.hint] in (
        [],
        ["executor ray"],
    )
    for name in ("fa", "fi"):
        found = findings[f"attention {name}"]
        assert found.status is Status.WARN and found.code == "device"
        assert found.text.endswith(": it runs on cuda from sm_80, and this is cpu")
        assert found.hint.startswith("Set attn (--attn) to sdpa.")
    assert findings["attention sdpa"].status is findings["choice"].status is Status.PASS
    assert findings["choice"].text.startswith(
        "attention sdpa, cache radix, scheduler mixed, runner eager, ops "
    )


@pytest.mark.feature("S15")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attn": "fa,fi"}, "attn (--attn) fa cannot serve"),
        ({"attn": "nope"}, "no attention backend 'nope' is installed"),
        (
            {"opt": ("fi.prefill=fa2",)},
            "opt (--opt) fi.prefill=fa2: no chosen plugin has that name",
        ),
        ({"opt": ("raidx.max_prefixes=4",)}, "; did you mean radix?"),
        ({"tp": 2, "executor": "inline"}, "executor (--executor) inline has one rank"),
        ({"ops": "torch", "page_size": 3, "attn": "sdpa"}, None),
    ],
)
def test_what_was_chosen_and_cannot_run_here_is_a_failure(
    settings: dict[str, Any], message: str | None
) -> None:
    (choice,) = (
        finding
        for finding in check_parts(EngineConfig(device="cpu", **settings))
        if finding.subject == "choice"
    )
    assert choice.status is (Status.PASS if message is None else Status.FAIL)
    assert message is None or message in choice.text


def test_flags_reach_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(verb, "run_checks", lambda config: seen.append(config) or iter(()))
    assert main(["doctor", "--attn", "fa", "--model", "x"]) == 0
    assert [(config.attn, config.model) for config in seen] == [("fa", "x")]
    assert main(["doctor", "--atn", "fa"]) == 2


def test_a_kind_without_any_plugin_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "load_specs", lambda kind: ())
    findings = list(plugin_checks.check_plugins(registry.find_missing))
    assert statuses(findings) == dict.fromkeys(plugin_checks.REQUIRED_KINDS, "FAIL")
    assert all("pip install" in finding.hint for finding in findings)


def checkpoint(folder: Path, weights: bytes) -> Path:
    """A directory with the configuration of an architecture that nobody serves, and one file of
    weights.
    """
    (folder / "config.json").write_text('{"architectures": ["X"]}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


HEADER = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
WHOLE = struct.pack("<Q", len(HEADER)) + HEADER + bytes(8)


@pytest.mark.parametrize(
    ("weights", "status"),
    [
        (WHOLE, "PASS"),
        (WHOLE[:-1], "FAIL"),
        (WHOLE[:20], "FAIL"),
        (b"", "FAIL"),
        (bytes([255] * 8) + WHOLE, "FAIL"),
    ],
)
def test_weights_are_read_as_far_as_their_header(
    tmp_path: Path, weights: bytes, status: str
) -> None:
    findings = list(check_parts(EngineConfig(model=str(checkpoint(tmp_path, weights)))))
    by_subject = statuses(findings)
    assert by_subject["config.json"] == "FAIL"  # nobody serves X
    assert by_subject["weights"] == status
    assert by_subject["tokenizer"] == "FAIL"  # there is none


def test_no_weights_and_no_directory(tmp_path: Path) -> None:
    checkpoint(tmp_path, WHOLE).joinpath("model.safetensors").unlink()
    assert statuses(list(check_parts(EngineConfig(model=str(tmp_path)))))["weights"] == "FAIL"
    findings = list(check_parts(EngineConfig(model=str(tmp_path / "none"))))
    assert findings[-1].status is Status.FAIL and "no model directory" in findings[-1].text


DEMO = Path(registry.load_spec("checkpoint", "demo").directory)


def copy_demo(folder: Path, **changes: Any) -> Path:
    """The demo model in `folder`: files with other contents, or without those whose contents are
    None.
    """
    for file in DEMO.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for stem, content in changes.items():
        (file,) = folder.glob(f"{stem}.*")
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
    return folder


def change_config(**changes: Any) -> str:
    """The demo model's config.json with other values."""
    return json.dumps(json.loads((DEMO / "config.json").read_text()) | changes)


BROKEN: dict[str, tuple[dict[str, Any], str, int]] = {
    "no config": ({"config": None}, "config.json", 6),
    "bad JSON": ({"config": "{bad"}, "config.json", 6),
    "a list": ({"config": "[]"}, "config.json", 6),
    "no architecture": ({"config": change_config(architectures=[])}, "config.json", 6),
    "unserved": ({"config": change_config(architectures=["FalconForCausalLM"])}, "config.json", 5),
    "quantized": ({"config": change_config(quantization_config={"bits": 4})}, "config.json", 6),
    "other shapes": ({"config": change_config(vocab_size=700)}, "weights", 6),
    "no weights": ({"model": None}, "weights", 6),
    "damaged weights": ({"model": "x"}, "weights", 6),
    "no tokenizer": ({"tokenizer": None}, "tokenizer", 6),
    "damaged tokenizer": ({"tokenizer": "{bad"}, "tokenizer", 6),
    "bad generation_config.json": ({"generation_config": "{bad"}, "generation_config.json", 6),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_model_that_cannot_be_read_is_one_failure_with_the_code_of_run(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, subject, code = BROKEN[damage]
    directory = str(copy_demo(tmp_path, **changes))
    findings = list(check_parts(EngineConfig(model=directory, device="cpu")))

    assert [
        (finding.subject, finding.exit_code)
        for finding in findings
        if finding.status is Status.FAIL
    ] == [(subject, code)]
    assert not any(
        "ModelError" in finding.text or "broke off" in finding.hint for finding in findings
    )
    flags = ["--model", directory, "--device", "cpu", "--num-pages", "64"]
    assert main(["doctor", *flags]) == main(["run", "--prompt", "x", "--quiet", *flags]) == code
    capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "subject", "message"),
    [("pytorch_model.bin", "weights", "only as pickles"), ("model.gguf", "model", "no header")],
)
def test_weights_in_another_format_fail_alone(
    name: str, subject: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copy_demo(tmp_path, model=None)
    (directory / name).write_bytes(b"GGUF")
    findings = list(check_parts(EngineConfig(model=str(directory), device="cpu")))

    (failure,) = [finding for finding in findings if finding.status is Status.FAIL]
    assert (failure.subject.split()[0], failure.exit_code) == (subject, 6)
    assert message in failure.text
    assert (
        main(["run", "--prompt", "x", "--quiet", "--model", str(directory), "--device", "cpu"]) == 6
    )
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("model", ["no-such-model", "config", "demo"])
def test_what_a_plugin_can_do_here_does_not_depend_on_whether_the_model_can_be_read(
    model: str, tmp_path: Path
) -> None:
    name = str(copy_demo(tmp_path, config="{bad")) if model == "config" else model
    findings = statuses(list(check_parts(EngineConfig(model=name, device="cpu"))))
    cuda = ("attention fa", "attention fi", "attention trtllm", "runner cudagraph", "ops triton")
    assert {subject: findings[subject] for subject in cuda} == dict.fromkeys(cuda, "WARN")
    assert findings["attention sdpa"] == findings["runner eager"] == "PASS"


def test_a_device_that_is_not_there_is_its_own_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    findings = [
        finding
        for finding in check_parts(EngineConfig(device="cuda"))
        if finding.status is Status.FAIL
    ]
    assert [(finding.subject, finding.exit_code) for finding in findings] == [("device", 5)]


def test_a_model_that_is_not_downloaded_yet_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    findings = list(check_parts(EngineConfig(model="owner/name", device="cpu")))
    assert findings[-1].status is Status.WARN and "is not in the cache yet" in findings[-1].text
    assert not any(finding.status is Status.FAIL for finding in findings)


def test_a_tokenizer_of_another_model_is_a_warning_and_its_texts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    words = [
        {**tokenizer["added_tokens"][0], "id": 768 + n, "content": f"<|{n}|>"} for n in range(9)
    ]
    tokenizer["added_tokens"] += words
    directory = str(copy_demo(tmp_path, tokenizer=json.dumps(tokenizer)))
    findings = {
        finding.subject: finding
        for finding in check_parts(EngineConfig(model=directory, device="cpu"))
    }
    assert findings["tokenizer"].status is Status.WARN
    assert findings["tokenizer"].text == "777 tokens, and the model has scores for 768"

    assert (
        main(["run", "--model", directory, "--prompt", "a<|8|>", "--quiet", "--num-pages", "64"])
        == 1
    )
    message = (
        "the tokenizer makes token 776 of this text, and the model knows 768: is it the "
        "model's own tokenizer?"
    )
    assert message in capsys.readouterr().err


def test_tools_memory_encoding_and_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert statuses(list(software_checks.check_tools())) == {"nvcc": "WARN", "ninja": "WARN"}
    monkeypatch.setattr(machine_checks, "LITTLE_MEMORY", 2**60)
    assert statuses(list(machine_checks.check_memory())) == {"memory": "WARN"}
    monkeypatch.setattr(machine_checks, "LITTLE_MEMORY", 0)
    assert statuses(list(machine_checks.check_memory())) == {"memory": "PASS"}
    monkeypatch.setattr(
        machine_checks.locale, "getpreferredencoding", lambda change: "ANSI_X3.4-1968"
    )
    assert statuses(list(machine_checks.check_encoding())) == {"encoding": "WARN"}
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "a" / "b"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert statuses(list(machine_checks.check_hub())) == {"cache": "PASS", "hub": "WARN"}
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file" / "b"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert statuses(list(machine_checks.check_hub()))["cache"] == "FAIL"


def test_python_and_torch() -> None:
    findings = statuses([*software_checks.check_python(), *software_checks.check_torch()])
    assert findings["python"] == findings["torch"] == "PASS"
