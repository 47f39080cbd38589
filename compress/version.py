"""The one version: of the package, of what it writes, and of the newest entry in CHANGELOG.md."""

DISTRIBUTION = "compress-vision"
"""The name to install the package by; `compress` in the registry is another project."""

__version__ = "0.2.0"


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of this package.

    >>> install_hint("timm")
    "pip install 'compress-vision[timm]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"
