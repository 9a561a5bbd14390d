"""A model without a network, and real servers of it: on a port of this machine, in a thread of this process."""

import http.client
import io
import threading
import time
from contextlib import contextmanager

import uvicorn
from PIL import Image

from ccfa.data import Framing
from ccfa.deployment import Prediction
from ccfa.deployment.serving import _listener, _server_config, app

COLOURS = {"red": (220, 0, 0), "green": (0, 220, 0), "blue": (0, 0, 220)}


class ColourModel:
    """Knows red, green and blue by heart, and any other classes by name."""

    def __init__(self, *more: str) -> None:
        self.class_names = (*COLOURS, *more)
        self.framing = Framing(8)
        updates = [{"accuracy": 0.875, "date": "2026-01-02T03:04:05+00:00"}]
        self.config = {"updates": updates, "experiment": {"method": "podnet", "ccfa": True}}
        self.open = threading.Event()  # it answers while this is set
        self.open.set()

    def gray_if_needed(self, pixels):
        return pixels

    def predict(self, pixels, top):
        assert self.open.wait(60)
        best = int(pixels.float().mean(dim=(0, 2, 3)).argmax())
        order = [best, *(label for label in range(len(self.class_names)) if label != best)][:top]
        shares = [0.6, 0.2, 0.1, 0.06, 0.04]
        listed = tuple((self.class_names[label], share) for label, share in zip(order, shares, strict=False))
        return [Prediction(*listed[0], listed, unfamiliar=bool(pixels.float().mean() < 50))]


def picture(colour="red", form="PNG", size=(40, 30)) -> bytes:
    """The bytes of an image file."""
    content = io.BytesIO()
    Image.new("RGB", size, COLOURS.get(colour, colour)).save(content, form)
    return content.getvalue()


@contextmanager
def serving(model=None, **options):
    """The port of a server that runs as `ccfa serve` runs it; `options` are those of `app`."""
    with _listener("127.0.0.1", 0) as listener:
        server = uvicorn.Server(_server_config(app(model or ColourModel(), **options)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def ask(port, method="GET", path="/", body=None, headers=()):
    """The answer of a server to one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, dict(headers))
        response = connection.getresponse()
        response.content = response.read()
        return response
    finally:
        connection.close()
