"""Names that no plugin has: the pip line of the distribution that they may mean."""

import pytest

from headstock.errors import MAX_ERROR_LENGTH, UnknownPlugin
from headstock.registry import InstalledPlugin, entries, find_plugin, unknown_name_error


def test_a_family_that_is_installed_names_its_architectures() -> None:
    message = (
        "no plugin is called 'gemma'; headstock-gemma has Gemma2ForCausalLM, Gemma3ForCausalLM, "
        "Gemma3ForConditionalGeneration"
    )
    assert str(unknown_name_error("gemma")).startswith(message)


def test_a_family_that_is_absent_is_known_by_the_name_of_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entries, "list_installed", lambda: ())
    line = "install it with: pip install ./models/qwen (in a checkout of headstock)"
    assert line in str(unknown_name_error("qwen")) and line in str(
        unknown_name_error("headstock-qwen")
    )
    assert "install it with" not in str(unknown_name_error("nothing-like-it"))


def test_of_many_that_are_installed_the_nearest_is_named_and_the_line_stays_short() -> None:
    many = [
        InstalledPlugin(
            kind="logits",
            name=f"processor-{number}",
            distribution=f"headstock-processor-{number}",
            version="1.0",
            target="a:b",
            status="ok",
        )
        for number in range(40)
    ]
    with pytest.raises(UnknownPlugin) as caught:
        find_plugin("logits", "procesor-37", many)
    message = str(caught.value)
    assert message.startswith("no logits processor 'procesor-37' is installed; installed: ")
    assert "processor-37 (headstock-processor-37 1.0)" in message and " more" in message
    assert message.endswith("; did you mean processor-37?") and len(message) <= MAX_ERROR_LENGTH
