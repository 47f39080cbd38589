"""The one import of Triton; or a stand-in where it is not installed, so that kernels can be imported anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
            def __getattr__(self, name: str) -> _Missing:
                return self

            def __call__(self, *args: object, **options: object) -> object:
                return args[0] if args else self

        triton = tl = _Missing()
        HAS_TRITON = False

__all__ = ["HAS_TRITON", "tl", "triton"]
