"""Parts found by name, and how other people add theirs: a decorator, an entry point, a plug-in file."""

import functools
import hashlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Generic, TypeVar

from ccfa.errors import CcfaError, Notice, UsageError

Part = TypeVar("Part")


class Registry(Mapping[str, Part], Generic[Part]):
    """Parts of one kind by name: those that were added, and those that installed packages offer.

    A package offers a part with an entry point of the group `ccfa.<kind>s`, for example `ccfa.methods`. The package is
    imported when the name is looked up, not before. A name that was added wins over an entry point.

    >>> shapes = Registry("shape")
    >>> shapes.add("square", 4)
    4
    >>> "square" in shapes, shapes["square"]
    (True, 4)
    """

    every: ClassVar[list["Registry[object]"]] = []

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._added: dict[str, Part] = {}
        Registry.every.append(self)  # type: ignore[arg-type]

    def add(self, name: str, part: Part) -> Part:
        """Add a part and return it. A name that is taken is refused."""
        if not isinstance(name, str) or not name:
            raise UsageError(f"A {self.kind} is registered under a name, got {name!r}.")
        if name in self._added:
            raise UsageError(f"There is already a {self.kind} named {name!r}. Choose another name.")
        self._added[name] = part
        return part

    @functools.cached_property
    def _offered(self) -> dict[str, EntryPoint]:
        offered = {point.name: point for point in entry_points(group=f"ccfa.{self.kind}s")}
        for name in offered.keys() & self._added.keys():
            warnings.warn(Notice(f"The {self.kind} {name!r} of an installed package is ignored: taken."), stacklevel=3)
        return offered

    def __getitem__(self, name: str) -> Part:
        if name not in self._added and name in self._offered:
            point = self._offered[name]
            try:
                part = point.load()
            except Exception as error:
                raise UsageError(f"The {self.kind} {name!r} ({point.value}) cannot be imported: {error}") from error
            self._added.setdefault(name, part)  # its module may have added it with the decorator
        return self._added[name]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._added, *self._offered])

    def __len__(self) -> int:
        return len(self._added.keys() | self._offered.keys())


def load_plugin(path: Path | str) -> ModuleType:
    """Import a Python file, so that the methods, backbones and data sets it registers can be used by name.

    A file is imported once; to load it again returns the same module.
    """
    path = Path(path).resolve()
    name = f"ccfa_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise UsageError(f"There is no Python file {path} to load as a plug-in.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        told = str(error) if isinstance(error, CcfaError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"The plug-in {path} failed. {told}") from error
    return module


def plugins_digest() -> str:
    """A digest of the files in which registered parts of other people are defined."""
    parts = [part for registry in Registry.every for part in registry._added.values()]
    modules = {inspect.getmodule(inspect.unwrap(part)) for part in parts if callable(part)}
    foreign = [module for module in modules if module and not module.__name__.startswith("ccfa.")]
    files = sorted(str(module.__file__) for module in foreign if getattr(module, "__file__", None))
    return hashlib.sha256(b"\0".join(Path(file).read_bytes() for file in files)).hexdigest() if files else ""
