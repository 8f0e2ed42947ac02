"""Shows mkdocstrings the package `hooked_ssm.tasks`, whose files are in tasks/ beside hooked_ssm/.

setuptools puts them together on install (package-dir in pyproject.toml); griffe reads files as
they lie, so that the site builds without importing torch.
"""

from __future__ import annotations

from typing import Any

import griffe


class TasksPackage(griffe.Extension):
    """Load tasks/ and hang it into hooked_ssm."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Called once per loaded package."""
        if pkg.path == "hooked_ssm" and "tasks" not in pkg.members:
            pkg.set_member("tasks", loader.load("tasks"))
