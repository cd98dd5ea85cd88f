"""The page's files and the cluster's numbers, over HTTP; in the package as it is installed."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from fastapi import FastAPI

from caravan.serve.pages import add_page, files


class Fixed:
    def snapshot(self):
        return {"devices": [], "time": 1.0}


def ask(path: str, method: str = "GET", view=None, **headers: str) -> httpx.Response:
    app = FastAPI()
    add_page(app, view)

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(asked())


def test_the_page_and_all_that_it_names():
    index = ask("/")
    assert index.status_code == 200
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="(?!#)([^"]+)"', index.text))
    for name, file in files().items():
        if name.endswith(".js"):
            found = re.findall(r'from "\./([\w.]+)"', file.data.decode())
            named |= {f"static/{other}" for other in found}
    assert named == {f"static/{name}" for name in files() if name != "index.html"}
    for name in named:
        answer = ask(f"/{name}")
        assert answer.status_code == 200 and answer.content, name
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_nothing_of_another_origin_may_be_loaded_and_nothing_is_inline():
    policy = ask("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    for name, file in files().items():
        text = file.data.decode()
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text, name
        assert not re.search(r"<script(?![^>]*src=)|<style| on\w+=| style=", text), name


@pytest.mark.parametrize("path", ["/", "/static/app.css"])
def test_what_a_browser_has_is_not_sent_again(path):
    first = ask(path)
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        again = ask(path, **{"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
    assert ask(path, **{"If-None-Match": '"other"'}).status_code == 200
    head = ask(path, "HEAD")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)


@pytest.mark.parametrize("name", ["none.js", "..%2f__init__.py", "../pages.py", ""])
def test_other_files_are_not_there(name):
    assert ask(f"/static/{name}").status_code == 404


def test_the_clusters_numbers():
    found = ask("/cluster", view=Fixed())
    assert found.json() == {"devices": [], "time": 1.0}
    assert found.headers["cache-control"] == "no-store"
    assert ask("/cluster").json() == {}


def test_files_are_small():
    assert sum(len(file.data) for file in files().values()) < 60_000
    assert all(file.data.count(b"\n") < 300 for name, file in files().items() if "css" not in name)


def test_an_icon_is_there_for_who_does_not_know_where():
    icon = ask("/favicon.ico")
    assert icon.content == files()["icon.svg"].data
    assert icon.headers["content-type"] == "image/svg+xml"
