"""Names that no plugin has: the pip line of the distribution that they may mean."""

import pytest

from headstock.registry import entries, unknown_name_error


def test_a_family_that_is_installed_names_its_architectures() -> None:
    message = (
        "no plugin is called 'gemma'; headstock-gemma has Gemma2ForCausalLM, Gemma3ForCausalLM"
    )
    assert str(unknown_name_error("gemma")) == message


def test_a_family_that_is_absent_is_known_by_the_name_of_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entries, "list_installed", lambda: ())
    line = "install it with: pip install ./models/qwen (in a checkout of headstock)"
    assert line in str(unknown_name_error("qwen")) and line in str(
        unknown_name_error("headstock-qwen")
    )
    assert "install it with" not in str(unknown_name_error("nothing-like-it"))
