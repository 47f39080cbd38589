"""The one version: of the package, of what it writes, and of the newest entry in CHANGELOG.md."""

__version__ = "0.1.0"
