"""Names for components, and loading of user code by path.

A registry is a table you can read: name -> import path. Nothing is imported until it is asked for, so looking at the
table costs nothing, importing xrl_lite has no side effects, and a worker process loads only what it runs.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import entry_points
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from xrl_lite.errors import PluginError, UnknownNameError, did_you_mean

T = TypeVar("T")

EXTERNAL_MODULES_VARIABLE = "XRL_LITE_USE_EXTERNAL_MODULES"
PLUGIN_GROUP = "xrl_lite.plugins"
_USER_MODULE = "xrl_lite_user_"
"""How the names of modules begin that were loaded from a file."""


class Registry(Generic[T]):
    """Resolves a registered name, or a path of the form ``package.module:attr``, to a component.

    Args:
        seam: What the components are, for messages ("judger").
        builtins: Built-in names, and the import paths or components they stand for.
    """

    def __init__(self, seam: str, builtins: Mapping[str, str | T]) -> None:
        self._seam = seam
        self._table: dict[str, str | T] = dict(builtins)

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers a component of user code under `name`.

        Raises:
            PluginError: another component has the name already.
        """

        def decorate(component: T) -> T:
            known = self._table.get(name)
            if known is not None and known != component:
                raise PluginError(f"The {self._seam} name {name!r} is taken by {known!r}. Choose another name.")
            self._table[name] = component
            return component

        return decorate

    def check(self, name: str) -> None:
        """Raise UnknownNameError where nothing is registered under a name; a path is not followed."""
        if name not in self._table and ":" not in name:
            raise UnknownNameError(self._unknown(name))

    def resolve(self, name: str) -> T:
        """Import and return the component behind `name`.

        Raises:
            UnknownNameError: nothing is registered under the name.
            PluginError: the component cannot be imported.
        """
        self.check(name)
        entry = self._table.get(name, name)
        return cast("T", load_object(entry) if isinstance(entry, str) else entry)

    def name_of(self, component: type) -> str:
        """Return the name a class is registered under, or its path if it is not."""
        path = f"{component.__module__}:{component.__qualname__}"
        for name, entry in self._table.items():
            if entry is component or entry == path:
                return name
        return path_of(component) or path

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._table))

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def _unknown(self, name: str) -> str:
        known = ", ".join(map(repr, self)) or "none"
        return (
            f"Unknown {self._seam} {name!r}.{did_you_mean(name, self._table)} Known: {known}. "
            f"To use your own, give its path, for example 'my_package.my_module:name' or 'my_file.py:name'."
        )


def load_object(path: str) -> Any:
    """Load ``"package.module:attr"``, ``"some/file.py:attr"`` or ``"package.module.attr"``.

    After a colon attr may have dots.

    Raises:
        PluginError: no such file, module or attribute, or the module raises or exits on import.
    """
    separator = ":" if ":" in path or path.endswith(".py") else "."
    module_name, _, attribute = path.rpartition(separator)
    if not module_name or not attribute:
        raise PluginError(f"{path!r} is not a path to an object. Write 'package.module:name' or 'file.py:name'.")
    module = load_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name, path)
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            names = [name for name in vars(module) if not name.startswith("_")]
            raise PluginError(f"{module_name} has no {attribute!r}.{did_you_mean(part, names)}") from error
    return found


def path_of(component: object) -> str | None:
    """Return the path by which `load_object` finds a function, a class or an instance in any process; None if none."""
    module = sys.modules.get(str(getattr(component, "__module__", None)))
    if module is None:
        return None
    names = [
        getattr(component, "__qualname__", ""),
        *(name for name, value in vars(module).items() if value is component),
    ]
    name = next((name for name in names if _attribute(module, name) is component), None)
    is_of_a_file = module.__name__ == "__main__" or module.__name__.startswith(_USER_MODULE) or _is_hidden(module)
    where = getattr(module, "__file__", None) if is_of_a_file else module.__name__
    return f"{where}:{name}" if where and name else None


def _attribute(module: ModuleType, name: str) -> object:
    try:
        return attrgetter(name)(module)
    except AttributeError:
        return None


def load_plugins(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Import the user's modules, so that what they register exists in this process. Returns their names.

    They are the modules named in ``XRL_LITE_USE_EXTERNAL_MODULES`` (comma-separated) and the entry points of group
    ``xrl_lite.plugins``.

    Raises:
        PluginError: one of them cannot be imported; names it.
    """
    named = [name.strip() for name in environment.get(EXTERNAL_MODULES_VARIABLE, "").split(",")]
    loaded = [name for name in named if name]
    for name in loaded:
        _import(name, f"{EXTERNAL_MODULES_VARIABLE}={name}")
    for plugin in entry_points(group=PLUGIN_GROUP):
        try:
            plugin.load()
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"The plug-in {plugin.name!r} ({plugin.value}) cannot be imported: it {_what_it_did(error)}"
            ) from error
        loaded.append(plugin.name)
    return loaded


def _import(module_name: str, asked: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise PluginError(f"Cannot load {asked!r}: importing {module_name!r} {_what_it_did(error)}") from error


def _what_it_did(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}); guard it with `if __name__ == '__main__':`"
    return f"raised {error!r}"


def make_importable(folder: Path) -> None:
    """Let modules of a folder be imported, in this process and in actors spawned from now on.

    It comes last in the search, so that a file called ``math.py`` hides nothing from anyone.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def load_file(path: Path) -> ModuleType:
    """Run a Python file as a module of its own, once in this process.

    It may import files beside it: while it runs they come before everything but the standard library, later they come
    last.

    Raises:
        PluginError: there is no such file, it raises, or it exits; or it would get another module than the file beside
            it.
    """
    resolved = path.expanduser().resolve()
    if not resolved.is_file():
        raise PluginError(f"Cannot load {path}: there is no such file (looked for {resolved}).")
    # one module per file: loading it twice must give the same classes
    name = f"{_USER_MODULE}{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise PluginError(f"Cannot load {path}: it is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    make_importable(resolved.parent)
    with ExitStack() as undo:
        undo.callback(sys.modules.pop, name, None)
        with _found_first(resolved.parent):
            _check_neighbours(resolved)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except (Exception, SystemExit) as error:
                raise PluginError(f"Cannot load {path}: running it {_what_it_did(error)}") from error
        _check_neighbours(resolved)  # what its functions import is found without help
        _send_hidden_by_value(resolved)
        undo.pop_all()
    return module


@contextmanager
def _found_first(folder: Path) -> Generator[None]:
    finder = _FolderFinder(folder)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _FolderFinder(MetaPathFinder):
    """Finds the files and packages of a folder, save those with a name of the standard library."""

    def __init__(self, folder: Path) -> None:
        self._path = [str(folder)]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or fullname in sys.stdlib_module_names:
            return None
        spec = PathFinder.find_spec(fullname, self._path, target)
        return spec if spec is not None and spec.origin is not None else None  # a folder alone may be anything


def _check_neighbours(file: Path) -> None:
    """Check that a file, and those beside it that it imports, get each other and not modules of the same names.

    Raises:
        PluginError: another file has the name; tells both.
    """
    for importing, name, meant in _neighbours(file):
        found = _file_behind(name)
        if found is not None and found != meant:
            raise PluginError(
                f"Cannot load {file}: {importing.name} imports {name}, which is {meant} beside it, but would get "
                f"{found}. A process can have one module of a name: rename {meant.name}, and import it by that."
            )


def _send_hidden_by_value(file: Path) -> None:
    """See to it that other processes get the code beside a file where they would import another of the name."""
    for _, name, _ in _neighbours(file):
        if (module := sys.modules.get(name)) is not None and _is_hidden(module):
            import cloudpickle  # hardly ever needed

            cloudpickle.register_pickle_by_value(module)  # pyright: ignore[reportUnknownMemberType]


def _is_hidden(module: ModuleType) -> bool:
    """Return whether a process that imports the name of a module would get another file."""
    file, name = getattr(module, "__file__", None), module.__name__
    if not file or "." in name:
        return False
    spec = PathFinder.find_spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() != Path(file).resolve()


def _neighbours(file: Path) -> Iterator[tuple[Path, str, Path]]:
    """Yield what a file, and those beside it, import from beside it: the importing file, the name, the file meant."""
    folder, seen, unread = file.parent, {file}, [file]
    while unread:
        importing = unread.pop()
        for name in _imported_by(importing):
            meant = _file_of(name, folder)
            if meant is None:
                continue
            yield importing, name, meant
            if meant not in seen:
                seen.add(meant)
                unread.append(meant)


def _imported_by(file: Path) -> Iterator[str]:
    """Yield the full names that may be those of modules which a file imports, and of the packages around them."""
    with suppress(SyntaxError, ValueError):  # told when it is run
        for node in ast.walk(ast.parse(file.read_bytes())):
            names = list[str]()
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                yield from accumulate(name.split("."), "{}.{}".format)


def _file_of(name: str, folder: Path) -> Path | None:
    """Return the file of a folder that is meant by the name of a module, if one is."""
    if name.partition(".")[0] in sys.stdlib_module_names:
        return None
    place = folder.joinpath(*name.split("."))
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((file.resolve() for file in files if file.is_file()), None)


def _file_behind(name: str) -> Path | None:
    """Return the file that an import of a module gets in this process, if it is known by now."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    elif "." in name:  # its package would have to be imported
        return None
    else:
        spec = importlib.util.find_spec(name)
        file = spec.origin if spec is not None else None
    return Path(file).resolve() if file else None
