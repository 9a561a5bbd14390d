"""A model on the web: post an image and get its classes, or drop a photo on a page and correct the answer."""

import asyncio
import base64
import hashlib
import io
import ipaddress
import json
import logging
import os
import re
import socket
import threading
import unicodedata
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import torch
from jinja2 import Environment, StrictUndefined
from PIL import Image, UnidentifiedImageError

import ccfa
from ccfa.data import decode_bytes
from ccfa.data.decoding import FORMATS
from ccfa.deployment.model import Model, load_model
from ccfa.errors import DataError, ResourceError, UsageError, installing
from ccfa.files import disk_errors, make_folder, require_place, write_atomically

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    raise UsageError(
        "Serving needs the packages starlette and uvicorn, which are not installed. "
        f"Install them with: {installing('serve')} (or pip install starlette uvicorn)."
    ) from error

LOCAL = ("localhost", "127.0.0.1", "[::1]")
TOP = 5
MAX_CONNECTIONS = 64
MAX_HEADER_BYTES = 16_384
MAX_NAME_BYTES = 200
CONNECTION_SECONDS = 60  # the longest life of a connection, which is closed after one answer
_STORED = re.compile(r"[0-9a-f]{32}\.[a-z]+")
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """What a server spends on its clients.

    Args:
        body_bytes: The size of an image file.
        body_seconds: How long a client may take to send it.
        answer_seconds: How long an image may wait for its turn and be worked on.
        at_once: How many images may be received, waiting and worked on at the same time. Further ones are refused.
        photos: How many corrected photos are stored.
        photo_bytes: How many bytes they have together.
        pixels: How many pixels of an image may be unpacked. A large JPEG is unpacked at a fraction of its size.

    Example:
        >>> Limits(body_bytes=1_000_000).at_once
        16
    """

    body_bytes: int = 20_000_000
    body_seconds: float = 10.0
    answer_seconds: float = 30.0
    at_once: int = 16
    photos: int = 10_000
    photo_bytes: int = 5_000_000_000
    pixels: int = 25_000_000


LIMITS = Limits()


def app(
    model: Model,
    corrections: Path | str | None = None,
    hosts: Collection[str] | None = LOCAL,
    limits: Limits = LIMITS,
) -> Starlette:
    """Return a web application for a model, to be run by any ASGI server. `ccfa serve` runs it with uvicorn.

    Args:
        model: The model.
        corrections: The folder for photos that a person has given another class. None means that answers cannot be
            corrected.
        hosts: The names by which clients may call the server. None means any name. The default protects a server that
            only this machine can reach from web pages of others, which would use a name of their own.
        limits: The limits on size, time and number of requests.

    Returns:
        The application. It answers `POST /predict`, `POST /corrections?class=NAME`, `GET /corrections`, `GET /model`,
        `GET /health` and, with the page, `GET /`.

    Example:
        >>> from types import SimpleNamespace
        >>> config = {"updates": [{"accuracy": 0.9, "date": ""}], "experiment": {"method": "podnet", "ccfa": True}}
        >>> model = SimpleNamespace(class_names=("ant", "bee"), config=config)  # or load_model("ants-and-bees")
        >>> [route.path for route in app(model).routes]
        ['/', '/predict', '/corrections', '/model', '/health']
    """
    desk = _Desk(limits)
    store = None if corrections is None else _Corrections(Path(corrections), model.class_names, limits)
    about = _about(model, store is not None)
    page, policy = _page(about, limits)

    async def show(request: Request) -> Response:
        return Response(page, media_type="text/html", headers={"content-security-policy": policy})

    async def predict(request: Request) -> Response:
        return _json(await desk.work(request, lambda content: _predicted(model, content, limits.pixels)))

    async def correct(request: Request) -> Response:
        if store is None:
            raise HTTPException(404, "Corrections are not stored here. Start the server with --corrections FOLDER.")
        if request.method == "POST":
            name = request.query_params.get("class", "")
            return _json(await desk.work(request, lambda content: _corrected(model, store, name, content)), 201)
        return _json({"corrections": await asyncio.to_thread(store.counts)})

    async def describe(request: Request) -> Response:
        return _json(about)

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    return Starlette(
        routes=[
            Route("/", show),
            Route("/predict", predict, methods=["POST"]),
            Route("/corrections", correct, methods=["GET", "POST"]),
            Route("/model", describe),
            Route("/health", health),
        ],
        middleware=[Middleware(_Guard, hosts=hosts)],
        exception_handlers={HTTPException: _refused, Exception: _failed},
    )


def serve(
    path: Path | str,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    corrections: Path | str | None = None,
    tell: Callable[[str], object] = print,
) -> None:
    """Serve a model until the process is interrupted. This is `ccfa serve`.

    Args:
        path: The model's folder.
        host: The address to listen on. By default only programs on this machine can reach it.
        port: The port. 0 means a free one.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.
        corrections: The folder for corrected photos. See `app`.
        tell: Is called with the address, when the server listens.
    """
    with _listener(host, port) as listener:
        address, port = listener.getsockname()[:2]
        is_local = ipaddress.ip_address(address).is_loopback
        name = f"[{address}]" if ":" in address else address
        model = load_model(path, device)
        application = app(model, corrections, (*LOCAL, host, name) if is_local else None)
        tell(f"{path} ({len(model.class_names)} classes) is served at http://{name}:{port} until you press Ctrl-C.")
        if not is_local:
            tell("Everyone who can reach this address can use the model. There is no password and no encryption.")
        uvicorn.Server(_server_config(application)).run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UsageError(f"The port must be from 0 to 65535, got {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of a server that has just ended
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ResourceError(
            f"Could not listen on port {port} of {host}: {error.strerror}. Choose others with --port and --host."
        ) from error
    return listener


class _Connection(H11Protocol):
    """A connection with an end: uvicorn itself waits without limit for a request and for an answer to be read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.end = self.loop.call_later(CONNECTION_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end.cancel()
        super().connection_lost(exc)


def _server_config(application: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=_Connection,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="error",  # tracebacks, but no line for each request that is refused
        access_log=False,
        proxy_headers=False,
        server_header=False,
        headers=[("connection", "close")],
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )


class _Guard:
    """Refuses requests that web pages of others make a browser send, and adds headers to each answer."""

    def __init__(self, application: ASGIApp, hosts: Collection[str] | None) -> None:
        self.application = application
        self.hosts = None if hosts is None else list(dict.fromkeys(name.lower() for name in hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] != "http":
            await self.application(scope, receive, send)
        elif refusal := self._refusal(scope["method"], Headers(scope=scope)):
            await refusal(scope, receive, send_guarded)
        else:
            await self.application(scope, receive, send_guarded)

    def _refusal(self, method: str, headers: Headers) -> Response | None:
        host = headers.get("host", "").lower()
        if self.hosts is not None and re.sub(r":\d+$", "", host) not in self.hosts:
            return _problem(421, f"This server has another name. Call it {' or '.join(self.hosts)}.")
        if method in ("GET", "HEAD"):
            return None
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        is_foreign = site not in ("same-origin", "none") if site else origin and origin.partition("://")[2] != host
        return _problem(403, "Pages of other sites may not use this server.") if is_foreign else None


class _Desk:
    """Receives images and works on one after the other, in one thread; refuses what is over the limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.places = threading.BoundedSemaphore(limits.at_once)
        self.executor = ThreadPoolExecutor(1, "ccfa-serve")

    async def work(self, request: Request, task: Callable[[bytes], Result]) -> Result:
        """Return what the task makes of the request's body."""
        busy = HTTPException(503, "The server is busy. Try again later.", {"retry-after": "1"})
        if not self.places.acquire(blocking=False):
            with suppress(HTTPException):
                await _body(request, 0, self.limits.body_seconds)
            raise busy
        try:
            content = await _body(request, self.limits.body_bytes, self.limits.body_seconds)
            job = self.executor.submit(task, content)
        except BaseException:
            self.places.release()
            raise
        job.add_done_callback(lambda _: self.places.release())  # also of a job whose client has given up
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job), self.limits.answer_seconds)
        except TimeoutError:
            raise busy from None


async def _body(request: Request, limit: int, seconds: float) -> bytes:
    """The body of a request. What is over the limit is received and dropped: a client reads after it has sent."""
    too_large = HTTPException(413, f"The image has too many bytes, expected at most {limit:,}.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit and "expect" in request.headers:  # it asks before it sends
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                else:
                    parts.clear()
    except TimeoutError:
        raise too_large if size > limit else HTTPException(408, f"The image did not arrive in {seconds:g} s.") from None
    except ClientDisconnect:
        raise HTTPException(400, "The client has left.") from None
    if size > limit:
        raise too_large
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        raise HTTPException(415, "Send the image file itself as the body, not a form: curl --data-binary @photo.jpg")
    return b"".join(parts)


def _predicted(model: Model, content: bytes, max_pixels: int) -> dict[str, object]:
    return model.predict(_pixels(model, content, max_pixels), top=TOP)[0].to_dict()


def _pixels(model: Model, content: bytes, max_pixels: int) -> torch.Tensor:
    if not content:
        raise HTTPException(400, "The request has no body. Send an image file: curl --data-binary @photo.jpg")
    try:
        pixels = decode_bytes(content, model.framing, max_pixels)
    except DataError as error:
        raise HTTPException(400, f"The image {error}.") from error
    return model.gray_if_needed(torch.from_numpy(pixels)[None])


def _corrected(model: Model, store: "_Corrections", name: str, content: bytes) -> dict[str, object]:
    _pixels(model, content, store.limits.pixels)  # only images are stored
    try:
        with disk_errors(f"store a photo in {store.folder}"):
            return {"class": store.add(name, content), "waiting": sum(store.counts().values())}
    except ResourceError as error:
        logging.getLogger(__name__).error("%s", error)
        raise HTTPException(507, "The server could not store the photo.") from error


class _Corrections:
    """Photos with the class that a person gave them: FOLDER/<class>/<digest>.<format>, as `ccfa learn` reads them."""

    def __init__(self, folder: Path, known: Collection[str], limits: Limits) -> None:
        require_place(folder)
        self.folder, self.known, self.limits = folder, known, limits

    def counts(self) -> dict[str, int]:
        """The number of photos by class."""
        counts: dict[str, int] = {}
        for path in self._photos():
            counts[path.parent.name] = counts.get(path.parent.name, 0) + 1
        return counts

    def add(self, name: str, content: bytes) -> str:
        """Store a photo and return the name of its class. If it was stored before, under another class, it is moved."""
        name = _class_name(name, self.known)
        digest = hashlib.sha256(content).hexdigest()[:32]
        photos = self._photos()
        earlier = [path for path in photos if path.stem == digest]
        size = len(content)
        for path in photos:
            with suppress(FileNotFoundError):  # its owner moves photos while the server runs
                size += path.stat().st_size
        if not earlier and (len(photos) >= self.limits.photos or size > self.limits.photo_bytes):
            raise HTTPException(507, "The server stores no more photos. Its owner can learn from them and move them.")
        path = self.folder / name / f"{digest}.{_ending(content)}"
        if path not in earlier:
            make_folder(path.parent)
            write_atomically(path, content)
        for other in earlier:
            if other != path:
                other.unlink(missing_ok=True)
                with suppress(OSError):  # `ccfa learn` refuses a class without photos
                    other.parent.rmdir()
        return name

    def _photos(self) -> list[Path]:
        found: list[Path] = []
        folders: list[str] = []
        with suppress(FileNotFoundError):
            folders = [entry.path for entry in os.scandir(self.folder) if entry.is_dir(follow_symlinks=False)]
        for folder in folders:
            with suppress(FileNotFoundError):  # it was moved since it was listed
                found += [Path(folder, name) for name in os.listdir(folder) if _STORED.fullmatch(name)]
        return sorted(found)


def _class_name(text: str, known: Collection[str]) -> str:
    """The name of a class as that of a folder: a known class, or a new one of letters, digits, spaces, - and _."""
    name = text if text in known else unicodedata.normalize("NFC", text).strip()
    if name in known:
        is_good = not re.search(r"[/\\\x00-\x1f]", name) and not name.startswith(".")
    else:
        is_good = re.fullmatch(r"[^\W_][\w -]*", name) is not None
    if not is_good or len(name.encode()) > MAX_NAME_BYTES:
        raise HTTPException(
            400, "A class has a name of letters, digits, spaces, - and _ that begins with a letter or a digit."
        )
    return name


def _ending(content: bytes) -> str:
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as file:
            return "jpeg" if file.format == "MPO" else str(file.format).lower()
    except UnidentifiedImageError:
        return "heic"  # the only other format that is decoded


def _about(model: Model, is_corrected: bool) -> dict[str, Any]:
    last, experiment = model.config["updates"][-1], model.config["experiment"]
    return {
        "classes": list(model.class_names),
        "accuracy": last["accuracy"],
        "method": experiment["method"] + (" + CCFA" if experiment["ccfa"] else ""),
        "updated": last["date"],
        "corrections": is_corrected,
        "ccfa": ccfa.__version__,
    }


def _page(about: Mapping[str, Any], limits: Limits) -> tuple[bytes, str]:
    """The page, and the security policy that allows its own style and script and nothing else."""
    source = (files("ccfa.deployment") / "templates" / "serving.html").read_text(encoding="utf-8")
    hashes = {}
    for tag in ("style", "script"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", source, flags=re.DOTALL)
        hashes[tag] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
    page = template.render(about=about, limit=limits.body_bytes).encode(errors="replace")
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}'; "
        "img-src blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, "application/json")  # ASCII: a class may have any name


def _problem(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json({"error": reason}, status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = error.detail
    if reason == HTTPStatus(error.status_code).phrase:  # of Starlette itself: an unknown address or another verb
        reason = f"{reason}. Expected POST /predict, POST /corrections, GET /corrections, GET /model or GET /health."
    return _problem(error.status_code, reason, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    return _problem(500, "The server has failed.")
