"""Lazy loading of a package's names, so that importing the package is quick."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package`` that imports names on first use; ``modules`` maps each name to
    its module."""

    def get(name: str) -> Any:
        if name in modules:
            found = vars(import_module(package))[name] = getattr(import_module(modules[name]), name)
            return found
        raise AttributeError(f"module '{package}' has no attribute '{name}'; it offers {', '.join(modules)}")

    return get
