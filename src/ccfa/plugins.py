"""Parts found by name, and how other people add theirs: a decorator, an entry point, a plug-in file."""

import functools
import hashlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

from ccfa.errors import CcfaError, Notice, UsageError

Part = TypeVar("Part")


class Registry(Mapping[str, Part], Generic[Part]):
    """Parts of one kind by name: those that were added, and those that installed packages offer.

    A package offers a part with an entry point of the registry's group, for example `ccfa.methods`. The package is
    imported when the name is looked up, not before. A name that was added wins over an entry point.

    Args:
        kind: What a part is called in messages.
        group: The group of entry points.
        wrap: Makes a part of a name and of the object that an entry point refers to, if it did not register itself.

    >>> shapes = Registry("shape", "ccfa.shapes")
    >>> shapes.add("square", 4)
    4
    >>> "square" in shapes, shapes["square"]
    (True, 4)
    """

    every: ClassVar[list["Registry[Any]"]] = []

    def __init__(self, kind: str, group: str, wrap: Callable[[str, Any], Part] = lambda name, part: part) -> None:
        self.kind, self.group, self.wrap = kind, group, wrap
        self._added: dict[str, Part] = {}
        Registry.every.append(self)

    def add(self, name: str, part: Part) -> Part:
        """Add a part and return it. A name that is taken is refused, unless the same function is defined again."""
        if not isinstance(name, str) or not name:
            raise UsageError(f"A {self.kind} is registered under a name, got {name!r}.")
        if name in self._added and _place(self._added[name]) != _place(part):  # a notebook's cell may be run again
            raise UsageError(f"There is already a {self.kind} named {name!r}. Choose another name.")
        self._added[name] = part
        return part

    @functools.cached_property
    def offered(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages, by name."""
        offered = {point.name: point for point in entry_points(group=self.group)}
        for name in offered.keys() & self._added.keys():
            warnings.warn(Notice(f"The {self.kind} {name!r} of an installed package is ignored: taken."), stacklevel=3)
        return offered

    def __getitem__(self, name: str) -> Part:
        if name not in self._added and name in self.offered:
            point = self.offered[name]
            try:
                part = point.load()
            except Exception as error:
                raise UsageError(f"The {self.kind} {name!r} ({point.value}) cannot be imported: {error}") from error
            if name not in self._added:  # its module may have added it with the decorator
                self._added[name] = self.wrap(name, part)
        return self._added[name]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._added, *self.offered])

    def __len__(self) -> int:
        return len(self._added.keys() | self.offered.keys())


def _function(part: Any) -> Any:
    """Return the function behind a part: a data set's loader, or what decorators have wrapped."""
    function = getattr(part, "loader", part)
    return inspect.unwrap(function) if callable(function) else function


def _place(part: Any) -> Any:
    function = _function(part)
    return (function.__module__, function.__qualname__) if inspect.isroutine(function) else function


_loaded: dict[str, str] = {}


def loaded_plugins() -> dict[str, str]:
    """Return the names of the plug-in files that were loaded, with the digest of each."""
    return dict(_loaded)


def load_plugin(path: Path | str) -> ModuleType:
    """Import a Python file, so that the methods, backbones and data sets it registers can be used by name.

    A file is imported once. Loading it again returns the same module. Runs and models record its name and digest.

    Args:
        path: The Python file. Its code is executed.

    Returns:
        The module.

    Raises:
        UsageError: If there is no such file, it fails, or another version of it is loaded.
    """
    path = Path(path).resolve()
    spec = None
    if path.is_file():
        name = f"ccfa_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if _loaded.get(path.name, digest) != digest:  # the name stands for the digest in every record
            raise UsageError(f"Another plug-in named {path.name}, or another version of it, is loaded already.")
        if name in sys.modules:
            _loaded[path.name] = digest
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"There is no Python file {path} to load as a plug-in.")
    _loaded[path.name] = digest
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look a class's module up
    before = [dict(registry._added) for registry in Registry.every]
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name], _loaded[path.name]
        reason = str(error) if isinstance(error, CcfaError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"The plug-in {path} failed. {reason}") from error
    if before == [registry._added for registry in Registry.every]:
        warnings.warn(Notice(f"{path} registers no method, backbone or data set."), stacklevel=2)
    return module


def plugins_digest() -> str:
    """Return a digest of the files in which registered parts of other people are defined."""
    parts = [part for registry in Registry.every for part in registry._added.values()]
    modules = {inspect.getmodule(function) for part in parts if callable(function := _function(part))}
    foreign = [module for module in modules if module and not module.__name__.startswith("ccfa.")]
    files = sorted(str(module.__file__) for module in foreign if getattr(module, "__file__", None))
    return hashlib.sha256(b"\0".join(Path(file).read_bytes() for file in files)).hexdigest() if files else ""
