"""Parts of what runs on a GPU, for several processes."""

from __future__ import annotations

import pytest
from gpu.share import take_share


@pytest.mark.parametrize("count", [1, 3, 8, 30])
def test_shares_are_all_items_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    for number in range(count):
        monkeypatch.setenv("GPU_SHARE", f"{number}/{count}")
        shares += take_share(range(20))
    assert sorted(shares) == list(range(20))
    monkeypatch.delenv("GPU_SHARE")
    assert list(take_share(range(20))) == list(range(20))


@pytest.mark.parametrize("share", ["4/4", "-1/4", "0/0"])
def test_a_share_that_does_not_exist_is_refused(
    share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_SHARE", share)
    with pytest.raises(ValueError, match="GPU_SHARE is"):
        take_share(range(20))
