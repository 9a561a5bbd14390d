"""The server, asked by a real client: answers, refusals, limits, and what reaches the disk."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import zlib
from contextlib import suppress
from urllib.parse import quote

import pytest

import ccfa
from ccfa.data import read_photos
from ccfa.deployment import serving as chapter
from ccfa.deployment.serving import Limits, _Corrections
from ccfa.errors import installing
from commands import COMMAND, environment
from served import COLOURS, ColourModel, ask, picture, serving

LARGE = 100_000


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def port(place):
    """A server for requests that leave no traces."""
    model = ColourModel("a/b", "../up", ".hidden", "\udcff", "<script>alert(1)</script>")
    with serving(model, corrections=place / "fixed", limits=Limits(body_bytes=LARGE)) as port:
        yield port


def told(response):
    """The reason of a refusal."""
    assert response.headers["content-type"] == "application/json"
    return json.loads(response.content)["error"]


def test_image_gets_five_classes(port):
    response = ask(port, "POST", "/predict", picture("green", "JPEG"))
    assert response.status == 200
    answer = json.loads(response.content)
    assert (answer["class"], answer["confidence"], answer["unfamiliar"]) == ("green", 0.6, False)
    assert [one["class"] for one in answer["top"]] == ["green", "red", "blue", "a/b", "../up"]
    assert json.loads(ask(port, "POST", "/predict", picture((9, 9, 10))).content)["unfamiliar"] is True


def test_headers_protect_every_answer(port):
    for response in (ask(port), ask(port, path="/health"), ask(port, path="/nowhere"), ask(port, "POST", "/predict")):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert response.headers["server"] is None


def test_model_describes_itself(port):
    about = json.loads(ask(port, path="/model").content)
    assert about["classes"][:4] == ["red", "green", "blue", "a/b"]
    assert (about["accuracy"], about["method"], about["corrections"]) == (0.875, "podnet + CCFA", True)
    assert json.loads(ask(port, path="/health").content) == {"status": "ok"}


def test_page_escapes_names(port):
    page = ask(port)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert b"<script>alert" not in page.content
    assert page.content.count(b"<script>") == 1
    assert "unsafe" not in page.headers["content-security-policy"]


def wide_png():
    """The beginning of a PNG file of 9,000 x 8,000 pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 9_000, 8_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + head
        + struct.pack(">II", zlib.crc32(head), 0)
        + b"IDAT"
        + bytes(4)
    )


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "word"),
    [
        ("POST", "/predict", b"", 400, "no body"),
        ("POST", "/predict", b"hello", 400, "not an image"),
        ("POST", "/predict", picture()[:50], 400, "decoded"),
        ("POST", "/predict", wide_png(), 400, "pixels"),
        ("POST", "/predict", bytes(LARGE + 1), 413, f"{LARGE:,}"),
        ("POST", "/predict", bytes(5_000_000), 413, f"{LARGE:,}"),
        ("POST", "/corrections?class=red", bytes(LARGE + 1), 413, f"{LARGE:,}"),
        ("POST", "/corrections?class=red", b"hello", 400, "not an image"),
        ("POST", "/corrections", picture(), 400, "name"),
        ("GET", "/predict", None, 405, "POST /predict"),
        ("PUT", "/corrections", None, 405, "Expected"),
        ("DELETE", "/model", None, 405, "Expected"),
        ("GET", "/model/config.json", None, 404, "Expected"),
        ("GET", "/../../etc/passwd", None, 404, "Expected"),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else None,
)
def test_refusals_say_why(port, method, path, body, status, word):
    response = ask(port, method, path, body)
    assert response.status == status
    assert word in told(response)


def test_chunked_body_is_cut_off(port):
    response = ask(port, "POST", "/predict", (bytes(10_000) for _ in range(50)))
    assert response.status == 413
    assert ask(port, "POST", "/predict", iter([picture("blue")])).status == 200


def test_client_that_asks_first_sends_nothing(port):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900000000\r\nExpect: 100-continue\r\n\r\n"
        )
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_form_is_told_how(port):
    response = ask(port, "POST", "/predict", picture(), {"Content-Type": "multipart/form-data; boundary=x"})
    assert response.status == 415
    assert "--data-binary" in told(response)


def test_malformed_requests_are_refused(port):
    for line in (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(line)
            assert client.recv(100).startswith(b"HTTP/1.1 400 ")
    assert ask(port, path="/health").status == 200


def test_slow_body_ends():
    with (
        serving(limits=Limits(body_seconds=0.2)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=60) as client,
    ):
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")


def test_silent_connection_ends(monkeypatch):
    monkeypatch.setattr(chapter, "CONNECTION_SECONDS", 0.2)
    with serving() as port, socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"GET / HT")
        with suppress(ConnectionResetError):
            assert client.recv(100) == b""


def test_client_that_leaves_frees_its_place():
    with serving(limits=Limits(at_once=1)) as port:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
        answers = (ask(port, "POST", "/predict", picture()).status for _ in range(1000))
        assert 200 in answers


def test_clients_wait_and_more_are_refused():
    model = ColourModel()
    model.open.clear()
    answers = []

    def wait_for(colour):
        while (response := ask(port, "POST", "/predict", picture(colour))).status == 503:
            pass  # the test had the place for a moment
        answers.append(json.loads(response.content)["class"])

    with serving(model, limits=Limits(body_bytes=LARGE, at_once=2, answer_seconds=60)) as port:
        clients = [threading.Thread(target=wait_for, args=[colour]) for colour in ("red", "blue")]
        for client in clients:
            client.start()
        while (refused := ask(port, "POST", "/predict", bytes(LARGE + 1))).status == 413:
            pass  # until both have their places
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert "busy" in told(ask(port, "POST", "/predict", bytes(3_000_000)))
        assert ask(port, path="/health").status == 200
        model.open.set()
        for client in clients:
            client.join(60)
        assert sorted(answers) == ["blue", "red"]
        assert ask(port, "POST", "/predict", picture()).status == 200


def test_answer_that_takes_too_long_ends():
    model = ColourModel()
    model.open.clear()
    with serving(model, limits=Limits(at_once=1, answer_seconds=0.2)) as port:
        assert ask(port, "POST", "/predict", picture()).status == 503
        assert ask(port, "POST", "/predict", picture()).status == 503  # its place is taken while it is worked on
        model.open.set()


def test_broken_model_is_a_server_error(monkeypatch, caplog):
    model = ColourModel()
    monkeypatch.setattr(model, "predict", lambda pixels, top: 1 / 0)
    with serving(model) as port:
        response = ask(port, "POST", "/predict", picture())
        assert (response.status, told(response)) == (500, "The server has failed.")
        assert ask(port, path="/health").status == 200
    assert "ZeroDivisionError" in caplog.text


HOSTILE = [
    "../x",
    "a/b",
    "../up",
    ".hidden",
    ".",
    "..",
    "",
    "\0",
    "a\0b",
    "x" * 10_000,
    "a\\b",
    "_x",
    "a\nb",
    "C:x",
    "%2e",
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name[:10]))
def test_hostile_names_reach_no_disk(port, place, name):
    response = ask(port, "POST", f"/corrections?class={quote(name, safe='')}", picture())
    assert (response.status, "name" in told(response)) == (400, True)
    assert list(place.rglob("*")) == []


def test_correction_is_stored_for_learning(tmp_path):
    content = picture("blue", "JPEG")
    with serving(corrections=tmp_path / "fixed") as port:
        assert json.loads(ask(port, path="/corrections").content) == {"corrections": {}}
        first = ask(port, "POST", "/corrections?class=green", content)
        assert (first.status, json.loads(first.content)) == (201, {"class": "green", "waiting": 1})
        ask(port, "POST", "/corrections?class=green", content)
        second = ask(port, "POST", f"/corrections?class={quote(' Äpfel 2 ')}", content)
        assert json.loads(second.content) == {"class": "Äpfel 2", "waiting": 1}
        third = ask(port, "POST", "/corrections?class=red", picture())
        assert json.loads(third.content) == {"class": "red", "waiting": 2}
        assert json.loads(ask(port, path="/corrections").content) == {"corrections": {"red": 1, "Äpfel 2": 1}}
    digest = hashlib.sha256(content).hexdigest()[:32]
    assert (tmp_path / "fixed" / "Äpfel 2" / f"{digest}.jpeg").read_bytes() == content
    assert read_photos(tmp_path / "fixed").images.class_names == ("red", "Äpfel 2")


@pytest.mark.parametrize("limits", [Limits(photos=2), Limits(photo_bytes=2 * len(picture()))], ids=["number", "bytes"])
def test_stored_photos_are_bounded(tmp_path, limits):
    sizes = [(40, 30), (30, 40), (31, 40)]
    with serving(corrections=tmp_path, limits=limits) as port:
        answers = [ask(port, "POST", "/corrections?class=red", picture(size=size)).status for size in sizes]
        assert answers == [201, 201, 507]
        assert ask(port, "POST", "/corrections?class=blue", picture(size=sizes[0])).status == 201  # only moved


@pytest.mark.parametrize("path", ["/predict", "/corrections?class=red"])
def test_pixels_are_limited(tmp_path, path):
    with serving(corrections=tmp_path, limits=Limits(pixels=1000)) as port:
        response = ask(port, "POST", path, picture(size=(40, 30)))
        assert (response.status, "40 x 30 pixels" in told(response)) == (400, True)
        assert ask(port, "POST", path, picture(size=(30, 30))).status in (200, 201)


def test_photos_may_be_moved_meanwhile(tmp_path, monkeypatch):
    """A folder that goes away while it is listed counts for nothing; a photo that goes away has no size."""
    with serving(corrections=tmp_path / "fixed") as port:
        for name in ("blue", "red"):
            ask(port, "POST", f"/corrections?class={name}", picture(name))
        listed = os.listdir

        def gone(path):
            if str(path).endswith("blue"):
                shutil.rmtree(path, ignore_errors=True)
            return listed(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", gone)
            response = ask(port, path="/corrections")
        assert (response.status, json.loads(response.content)) == (200, {"corrections": {"red": 1}})
        counted = _Corrections._photos
        monkeypatch.setattr(_Corrections, "_photos", lambda self: [*counted(self), tmp_path / "moved.png"])
        assert ask(port, "POST", "/corrections?class=green", picture("green")).status == 201


def test_photo_that_cannot_be_stored(tmp_path, caplog):
    (tmp_path / "red").touch()
    with serving(corrections=tmp_path) as port:
        response = ask(port, "POST", "/corrections?class=red", picture())
    assert response.status == 507
    assert str(tmp_path) not in told(response)
    assert str(tmp_path) in caplog.text


def test_nothing_is_stored_unless_asked():
    with serving() as port:
        for method in ("GET", "POST"):
            response = ask(port, method, "/corrections?class=red", picture() if method == "POST" else None)
            assert (response.status, "--corrections" in told(response)) == (404, True)
        assert b"<form" not in ask(port).content


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {"Host": "localhost:8000"}, 200),
        ("GET", {"Host": "[::1]:8000"}, 200),
        ("GET", {"Host": "evil.example"}, 421),
        ("GET", {"Host": "localhost.evil.example:8000"}, 421),
        ("POST", {"Host": "evil.example"}, 421),
        ("POST", {"Sec-Fetch-Site": "same-origin"}, 400),
        ("POST", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("POST", {"Sec-Fetch-Site": "same-site"}, 403),
        ("POST", {"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 400),
        ("POST", {"Host": "localhost:8000", "Origin": "http://localhost:9000"}, 403),
        ("POST", {"Origin": "null"}, 403),
        ("POST", {"Origin": "http://[::1"}, 403),
        ("GET", {"Origin": "http://evil.example"}, 200),
    ],
)
def test_pages_of_others_are_refused(port, method, headers, status):
    path = "/health" if method == "GET" else "/corrections?class=."
    assert ask(port, method, path, picture() if method == "POST" else None, headers).status == status


def test_any_name_may_be_allowed():
    for hosts in (None, ["Photos.example"]):
        with serving(hosts=hosts) as port:
            assert ask(port, headers={"Host": "photos.example"}).status == 200


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A real model of three colours, which has learned next to nothing."""
    place = tmp_path_factory.mktemp("model")
    for name, colour in COLOURS.items():
        (place / "photos" / name).mkdir(parents=True)
        for number in range(3):
            content = picture(tuple(max(part, number) for part in colour))
            (place / "photos" / name / f"{number}.png").write_bytes(content)
    asked = ccfa.Learning(method="finetune", image_size=8, options={"epochs": "1"})
    ccfa.learn(place / "model", place / "photos", asked)
    return place / "model"


@pytest.mark.slow
def test_command_serves_until_interrupted(model, tmp_path):
    words = [*COMMAND, "serve", model, "--port", "0", "--device", "cpu", "--corrections", "fixed"]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        port = int(re.search(r"http://127\.0\.0\.1:(\d+) ", process.stdout.readline())[1])
        answer = json.loads(ask(port, "POST", "/predict", picture("blue")).content)
        assert {one["class"] for one in answer["top"]} == set(COLOURS)
        expected = ccfa.load_model(model, "cpu").predict(model.parent / "photos" / "blue" / "0.png")[0]
        assert (answer["class"], answer["unfamiliar"]) == (expected.name, expected.unfamiliar)
        assert answer["confidence"] == pytest.approx(expected.confidence, abs=1e-4)
        assert ask(port, "POST", "/corrections?class=blue", picture("blue")).status == 201
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, out, errors) == (130, "", "Stopped.\n")
    finally:
        process.kill()
        process.communicate()
    assert len(list(tmp_path.glob("fixed/blue/*.png"))) == 1


def test_taken_port_is_told(call):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        code, _, errors = call("serve", "model", "--port", number)
    assert code == 5
    assert str(number) in errors
    assert "--port" in errors
    assert call("serve", "model", "--port", "70000")[0] == 2
    assert call("serve", "nowhere", "--port", "0")[0] == 4


def test_missing_extra_is_named(call, monkeypatch):
    monkeypatch.delitem(sys.modules, "ccfa.deployment.serving")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, errors = call("serve", "model")
    assert code == 2
    assert installing("serve") in errors
