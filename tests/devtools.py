"""A page opened in a headless browser: what it asked for, what went wrong, what it holds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOCAL = ("file:", "data:", "blob:", "about:")


@dataclass
class Seen:
    """What a page did.

    Attributes:
        requests: Addresses asked for, all of them.
        errors: Errors on the console and exceptions that nobody caught.
        value: Of the expression.
    """

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    value: Any = None

    @property
    def outside(self) -> list[str]:
        """Requests that leave the machine."""
        return [address for address in self.requests if not address.startswith(LOCAL)]


def open_page(path: Path, ready: str, expression: str, timeout: float = 60) -> Seen:
    """Open a page, wait until the expression `ready` is true, and return what was seen."""
    return asyncio.run(asyncio.wait_for(_open(path, ready, expression), timeout))


async def _open(path: Path, ready: str, expression: str) -> Seen:
    from choreographer import Browser

    seen = Seen()

    async def request(event: dict[str, Any]) -> None:
        seen.requests.append(event["params"]["request"]["url"])

    async def entry(event: dict[str, Any]) -> None:
        if event["params"]["entry"]["level"] == "error":
            seen.errors.append(event["params"]["entry"]["text"])

    async def console(event: dict[str, Any]) -> None:
        if event["params"]["type"] in ("error", "assert"):
            seen.errors.append(str(event["params"]["args"]))

    async def exception(event: dict[str, Any]) -> None:
        seen.errors.append(str(event["params"]["exceptionDetails"]))

    async with Browser(headless=True, enable_gpu=False) as browser:
        tab = await browser.create_tab("")
        tab.subscribe("Network.requestWillBeSent", request)
        tab.subscribe("Log.entryAdded", entry)
        tab.subscribe("Runtime.consoleAPICalled", console)
        tab.subscribe("Runtime.exceptionThrown", exception)
        for domain in ("Network", "Log", "Runtime", "Page"):
            await tab.send_command(f"{domain}.enable")
        await tab.send_command("Page.navigate", {"url": path.as_uri()})
        while not await _value(tab, ready):
            await asyncio.sleep(0.1)
        seen.value = await _value(tab, expression)
    return seen


async def _value(tab: Any, expression: str) -> Any:
    asked = {"expression": expression, "returnByValue": True}
    answer = await tab.send_command("Runtime.evaluate", asked)
    return answer["result"]["result"].get("value")
