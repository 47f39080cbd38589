"""Tables of the study of 2:4 products; they need nothing but Python, as a machine with torch alone prints them too."""

from __future__ import annotations

from analysis.common.study import Row


def speedup(row: Row) -> float | None:
    """Return dense time over 2:4 time, of the same result type; None if either is missing."""
    return row["dense"]["ms"] / row["2:4"]["ms"] if "dense" in row and "2:4" in row else None


def _sparse_ms(row: Row) -> float:
    """Return the time of the 2:4 product, or of the dense one where there is none."""
    return float((row["2:4"] if "2:4" in row else row["dense"])["ms"])


def summary(rows: list[Row]) -> list[str]:
    """Return a Markdown table: a network's products together, all 2:4, and 2:4 only where it is faster."""
    lines = [
        "| network | batch | precision | dense ms | 2:4 ms | gain | the faster of both ms | gain | layers that gain |",
        "| --- " * 9 + "|",
    ]
    for key in dict.fromkeys((r["network"], r["batch"], r["precision"]) for r in rows):
        every = [r for r in rows if (r["network"], r["batch"], r["precision"]) == key]
        own = [r for r in every if "dense" in r]
        if not own:
            lines.append(f"| {' | '.join(map(str, key))} | " + "- | " * 5 + f"none of {len(every)} shapes measured |")
            continue
        dense = sum(r["count"] * r["dense"]["ms"] for r in own)
        sparse = sum(r["count"] * _sparse_ms(r) for r in own)
        best = sum(r["count"] * min(r["dense"]["ms"], _sparse_ms(r)) for r in own)
        gaining = sum(r["count"] for r in own if (speedup(r) or 0) > 1.02)
        total = sum(r["count"] for r in own)
        partial = f", {len(own)} of {len(every)} shapes measured" if len(own) < len(every) else ""
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {dense:.3f} | {sparse:.3f} | {dense / sparse:.2f} | {best:.3f} | "
            f"{dense / best:.2f} | {gaining} of {total}{partial} |"
        )
    return lines


def details(rows: list[Row]) -> list[str]:
    """Return a Markdown table of every shape."""
    lines = [
        "| network | batch | precision | layer | times | outputs | inputs | positions | dense ms | 2:4 ms | gain |"
        " 2:4, FP16 out ms | how |",
        "| --- " * 13 + "|",
    ]
    keys = ("network", "batch", "precision", "layer", "count", "outputs", "inputs", "positions")
    for r in rows:
        gain = speedup(r)
        kinds = ("dense", "2:4", "2:4 fp16 out")[: 3 if r["precision"] == "int8" else 2]
        dense, sparse, *half = [f"{r[kind]['ms']:.4f}" if kind in r else "-" for kind in kinds]
        how = r.get("skipped") or (r["2:4"]["how"] if gain else "; ".join(r["failed"]))
        how += ", launched without a graph" if gain and r["timed"] != "graph" else ""
        cells = [*(r[key] for key in keys), dense, sparse, f"{gain:.2f}" if gain else "-", *(half or ["-"]), how]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines
