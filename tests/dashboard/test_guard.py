"""Who may see the page, and who may act there: as other sites, other names and other programs would try it."""

from __future__ import annotations

import json

import pytest
from tests.dashboard.rigged import RiggedSource

pytest.importorskip("cyclopts")
pytest.importorskip("anycorn", reason="comes with the extra `dashboard`")

from tests.dashboard.asking import act, ask, entered, page_headers, serving

from trimesh import limits
from trimesh.cli.dashboard.site import PageDoor, checked_prefix


def small() -> RiggedSource:
    return RiggedSource(1, 2, is_well=True)


async def test_nothing_is_shown_without_a_token():
    """GU-3: no path, not even a style sheet; a wrong token is no better; it listens at the loopback address alone."""
    async with serving(small()) as server:
        for path in ("/", "/static/page.js", "/api/stream", "/api/session", "/api/detail?name=controller", "/x"):
            assert (await ask(server, path)).status == 401, path
            assert (await ask(server, path, cookie=f"trimesh-{server.port}=guess")).status == 401, path
        assert (await ask(server, "/?token=guess")).status == 401
        assert (await ask(server, "/api/kill", "POST", b"{}", origin=f"http://127.0.0.1:{server.port}")).status == 401
        assert server.address.startswith("http://127.0.0.1:")


async def test_token_works_once_and_becomes_a_cookie_that_no_script_sees():
    """GU-3: the next browser needs the next token; who has come already may use the old address again."""
    used = list[str]()
    async with serving(small(), on_used=lambda: used.append("")) as server:
        token = server.door.token
        answer = await ask(server, f"/?token={token}")
        flags = answer.headers["set-cookie"].lower()
        assert answer.status == 200
        assert "httponly" in flags
        assert "samesite=strict" in flags
        assert "path=/" in flags
        assert token not in answer.text
        cookie = answer.headers["set-cookie"].partition(";")[0]
        assert (await ask(server, f"/?token={token}")).status == 401
        assert (await ask(server, f"/?token={token}", cookie=cookie)).status == 200
        assert (await ask(server, "/", cookie=cookie)).status == 200
        assert (used, server.door.token != token) == ([""], True)


@pytest.mark.parametrize("host", ["evil.test", "127.0.0.1.evil.test:80", "localhost@evil.test", "", "127.0.0.2", "a b"])
async def test_names_of_others_are_refused(host: str):
    """GU-1: DNS rebinding: the site's own name stands in Host, whatever address it has."""
    async with serving(small()) as server:
        cookie = await entered(server)
        answer = await ask(server, "/", cookie=cookie, host=host)
        assert answer.status in (400, 421)
        assert "processes" not in answer.text


async def test_names_of_this_machine_are_served_at_any_port():
    """GU-1: `ssh -L` has a port of its own; a proxy's name is allowed by name."""
    async with serving(small(), hosts=["gate.example"]) as server:
        cookie = await entered(server)
        for host in ("localhost:9999", "127.0.0.1:1", "[::1]:8787", "LOCALHOST", "gate.example:443"):
            assert (await ask(server, "/", cookie=cookie, host=host)).status == 200, host
        assert (
            await act(server, "kill", "5", cookie, host="localhost:9999", origin="http://localhost:9999")
        ).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.test"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"},
    ],
)
async def test_other_sites_are_refused(headers: dict[str, str]):
    """GU-2: also with the cookie, which they would not have."""
    source = small()
    async with serving(source) as server:
        cookie = await entered(server)
        assert (await ask(server, "/api/stream", cookie=cookie, **headers)).status == 403
        assert (await act(server, "kill", "5", cookie, **headers)).status == 403
        assert source.acts == []


async def test_link_on_another_site_leads_to_the_page():
    """GU-2: with its token; without, to a refusal."""
    async with serving(small()) as server:
        link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
        assert (await ask(server, "/", **link)).status == 401
        assert (await entered(server, **link)).startswith("trimesh-")


async def test_acts_need_the_header_token_of_their_session():
    """GU-4: the cookie alone is not enough, nor another session's token, nor a form."""
    source = small()
    async with serving(source) as server:
        cookie, other = await entered(server), await entered(server)
        others = json.loads((await ask(server, "/api/session", cookie=other)).text)["act"]
        assert (await act(server, "kill", "5", cookie, x_trimesh_token="")).status == 403
        assert (await act(server, "kill", "5", cookie, x_trimesh_token=others)).status == 403
        assert (await act(server, "kill", "5", cookie, origin="")).status == 403
        assert (await act(server, "kill", "5", cookie, content_type="text/plain")).status == 415
        assert (await ask(server, "/api/kill", cookie=cookie)).status == 405
        assert (await ask(server, "/api/kill", "PUT", b"{}", cookie=cookie)).status == 405
        assert source.acts == []
        assert (await act(server, "kill", "5", cookie)).status == 200
        assert (await act(server, "cancel", "0.1@5", cookie)).status == 200
        assert source.acts == [("kill", "5"), ("cancel", "0.1@5")]


async def test_every_answer_forbids_what_the_page_does_not_need():
    """GU-5: refusals, too."""
    async with serving(small()) as server:
        cookie = await entered(server)
        for answer in (await ask(server, "/", cookie=cookie), await ask(server, "/"), await ask(server, "/", host="x")):
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"
            assert "server" not in answer.headers


async def test_page_works_below_a_prefix():
    """All of it, with a cookie for these paths only; the page has relative addresses."""
    async with serving(small(), prefix=checked_prefix("runs/train/")) as server:
        assert server.address.startswith(f"http://127.0.0.1:{server.port}/runs/train/?token=")
        answer = await ask(server, f"/runs/train/?token={server.door.token}")
        assert "path=/runs/train/" in answer.headers["set-cookie"].lower()
        cookie = answer.headers["set-cookie"].partition(";")[0]
        assert (await ask(server, "/runs/train/static/page.js", cookie=cookie)).status == 200
        assert (await ask(server, "/runs/train", cookie=cookie)).headers["location"] == "/runs/train/"
        for outside in ("/", "/api/session", "/runs/trainer/", "/runs/train/../../api/session"):
            assert (await ask(server, outside, cookie=cookie)).status == 404
        page = (await ask(server, "/runs/train/", cookie=cookie)).text
        assert 'href="/' not in page
        assert 'src="/' not in page
    with pytest.raises(ValueError, match="--prefix"):
        checked_prefix("a b")


async def test_bad_requests_are_answered_in_words():
    """Whatever a client sends: no answer shows a traceback, and the next one is served."""
    async with serving(small()) as server:
        cookie = await entered(server)
        usual = await page_headers(server, cookie)
        for body in (
            b"",
            b"{",
            b"[]",
            b'{"target": 5}',
            b"\xff",
            b"[" * 3000,
            b" " * (limits.PAGE_REQUEST_BYTES_MAX + 1),
        ):
            answer = await ask(server, "/api/kill", "POST", body, **usual)
            assert answer.status == 400, body[:20]
            assert "Traceback" not in answer.text
        for path in ("tasks?millis=-1", "tasks?until=" + "9" * 40, "logs?after=x", "logs?after=%F0%9F%98%80"):
            assert (await ask(server, f"/api/{path}", cookie=cookie)).status == 400, path
        for name in ("procs:trainers:" + "9" * 30, "procs:trainers:77777", ":", "%00", "<script>"):
            assert "is gone" in (await ask(server, f"/api/detail?name={name}", cookie=cookie)).text, name
        for path in ("/static/../guard.py", "/static/%2e%2e/guard.py", "/static//etc/passwd"):
            assert (await ask(server, path, cookie=cookie)).status == 404, path
        assert (await ask(server, "/", cookie=f"{cookie}; a\x07=1")).status in (200, 400, 401)
        assert (await ask(server, "/", cookie=cookie)).status == 200


def test_sessions_are_bounded():
    """GU-3: the browser that came first has to come again."""
    door = PageDoor()
    cookies = [door.enter(door.token) for _ in range(40)]
    assert all(cookies)
    assert door.act_token(cookies[0] or "") is None
    assert door.act_token(cookies[-1] or "") is not None
    assert len({door.act_token(cookie or "") for cookie in cookies[-30:]}) == 30
