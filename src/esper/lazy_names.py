"""Names of a package that are loaded on first use, so that importing the package is quick."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package``; ``modules`` maps each name to the module that defines it."""

    def get(name: str) -> Any:
        if name in modules:
            found = vars(import_module(package))[name] = getattr(import_module(modules[name]), name)
            return found
        raise AttributeError(f"module '{package}' has no attribute '{name}'; it offers {', '.join(modules)}")

    return get
