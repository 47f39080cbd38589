"""The one import of Triton; or a stand-in where it is not installed, so that kernels can be imported anywhere.

A decorator of the stand-in returns the function that it is given, and its constants are their values; nothing can be
launched. `HAS_TRITON` says which of the two it is; `compress.kernels.dispatch` asks it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import triton as triton
    import triton.language as tl

    HAS_TRITON: bool
else:
    try:
        import triton
        import triton.language as tl

        HAS_TRITON = True
    except ImportError:

        class _Missing:
            def __getattr__(self, name: str) -> Any:
                return self

            def __call__(self, *args: Any, **options: Any) -> Any:
                return args[0] if args else self

        triton = tl = _Missing()
        HAS_TRITON = False

__all__ = ["HAS_TRITON", "tl", "triton"]
