"""Pages of other sites, which a browser lets send forms to any server."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Browser
from served import Served

SEND = """([url, body, referrerPolicy]) => fetch(url, {
    method: "POST", mode: "no-cors", referrerPolicy, body,
    headers: {"content-type": "application/x-www-form-urlencoded"},
})"""


@pytest.mark.feature("W20")
@pytest.mark.parametrize("policy", ["unsafe-url", "no-referrer"])
def test_a_page_cannot_send_what_curl_may(browser: Browser, server: Served, policy: str) -> None:
    body = json.dumps({"model": "demo", "prompt": "hi", "stream": False})
    page = browser.new_page()
    # To a browser, a server's name and its address are two sites.
    page.goto(f"http://localhost:{server.port}/version")
    page.evaluate(SEND, [f"http://127.0.0.1:{server.port}/api/generate", body, policy])
    page.close()
    assert server.wait_for_line(path="/api/generate")["status"] == 415
    server.log.clear()
