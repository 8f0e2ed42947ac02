"""Shows mkdocstrings the package as Python sees it after imports; griffe reads files as they lie.

So the site builds without importing torch. Two things differ between files and imports:
`hooked_ssm.tasks` lies in tasks/ beside hooked_ssm/ (package-dir in pyproject.toml), and a package
that imports a function from the submodule of the same name, as `hooked_ssm.analysis` does with
`token_mixing`, shows the function and hides the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe


class AsImported(griffe.Extension):
    """Hang tasks/ into hooked_ssm, and put functions where they hide their modules."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Called once per loaded package."""
        if pkg.path != "hooked_ssm":
            return
        pkg.set_member("tasks", loader.load("tasks"))
        packages = [module for module in _modules(pkg) if module.is_init_module]
        for package in packages:  # before any module is hidden: imports are found through it
            for member in package.members.values():
                if isinstance(member, griffe.Alias) and member.target_path.startswith(pkg.path):
                    member.resolve_target()
        for package in packages:
            for name, module in list(package.members.items()):
                imported = package.imports.get(name) == f"{package.path}.{name}.{name}"
                if imported and isinstance(module, griffe.Module):
                    function = module.members[name]
                    package.members[name] = griffe.Alias(name, function, parent=package)


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for member in list(module.members.values()):
        if isinstance(member, griffe.Module):
            yield from _modules(member)
