"""Templates to pages: one self-contained file, nothing fetched, nothing trusted."""

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ccfa.reporting.axes import number
from ccfa.reporting.values import counted


def render(template: str, **values: Any) -> str:
    """A page from a template that extends base.html; every value is escaped unless it is Markup."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ccfa.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = _source("script.js")
    # Only this very script may run: a class name that smuggled one in would find it refused.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(style=Markup(_source("style.css")), script=Markup(script), script_hash=digest)
    environment.filters.update(percent=percent, number=number, counted=counted)
    return environment


def percent(value: float | None, decimals: int = 1) -> str:
    """A fraction as a percentage; a dash where there is none."""
    return "-" if value is None else number(100 * value, decimals=decimals)


def _source(name: str) -> str:
    return (files("ccfa.reporting") / "templates" / name).read_text(encoding="utf-8").strip()
