"""Printing of `inspect parity --mend` and `--mend-sqnr`."""

from __future__ import annotations

from dataclasses import asdict

from rich.markup import escape

from compress.cli.console import OUT, print_json, print_table
from compress.measure.latency import NOT_MEASURED
from compress.pipeline.studies.mend import MendReport
from compress.pipeline.studies.sensitivity import plain
from compress.quantization.sensitivity.compare import Effect
from compress.support.meters import metric_title, score_text

_ROWS = 12


def show_mended(found: MendReport, *, as_json: bool) -> None:
    """Print diagnosis, changes and prices."""
    mended = found.mended
    if as_json:
        document = plain(
            {
                "diagnosis": asdict(mended.diagnosis),
                "goal": mended.goal,
                "met": mended.met,
                "changes": [asdict(change) for change in mended.changes],
                "effect": asdict(mended.effect),
                "prices": [asdict(price) for price in found.prices],
                "not_timed": found.not_timed,
                "recipe": None if found.recipe is None else str(found.recipe),
            }
        )
        print_json(document)
        return
    _show_diagnosis(found)
    unit = mended.diagnosis.unit
    if mended.changes:
        columns = ("change", "because", "without it")
        rows = [
            (change.text, change.cause, "" if change.without is None else _effect(change.without, unit))
            for change in mended.changes
        ]
        print_table("the smallest set of changes that was found", columns, rows)
    verdict = "met" if mended.met else "NOT met, whatever was changed"
    OUT.print(f"{mended.goal}: {verdict}; {_effect(mended.effect, unit)}")
    if found.prices:
        columns = ("network", "p50 ms", "mended takes")
        rows_ms = [
            (price.label, f"{price.p50_ms:.3f}", NOT_MEASURED if price.unquiet else f"{price.ratio:.3f}")
            for price in found.prices
        ]
        print_table("time of a run, in turn", columns, rows_ms, numbers=columns[1:])
    elif mended.changes:
        OUT.print(escape(found.not_timed))
    if found.recipe is not None:
        OUT.print(str(found.recipe), highlight=False, soft_wrap=True)


def _show_diagnosis(found: MendReport) -> None:
    seen = found.mended.diagnosis
    columns = ("layer", "alone, dB", "share of noise", "why")
    rows = [
        (row.layer, f"{row.alone.sqnr_db:.1f}", f"{row.share:.1%}", "; ".join(c.text for c in row.causes[:2]))
        for row in seen.rows[:_ROWS]
    ]
    print_table(f"noisiest layers of {len(seen.rows)}", columns, rows, numbers=columns[1:3])
    if seen.first is not None:
        OUT.print(
            f"first tensor that diverges: {seen.first.tensor}, {seen.first.sqnr_db:.1f} dB; what it is computed from "
            f"has {seen.first.before_db:.1f} dB"
        )
    score = ""
    if seen.float_score is not None:
        score = f", {metric_title(seen.metric)} {score_text(seen.float_score, seen.unit)} in float"
    OUT.print(f"{seen.images} images{score}; quantized {_effect(seen.quantized, seen.unit)}")


def _effect(effect: Effect, unit: str) -> str:
    parts = [f"{effect.sqnr_db:.1f} dB"]
    if effect.agreement is not None:
        parts.append(f"{effect.agreement:.1%} agree with float")
    if effect.score is not None:
        parts.append(score_text(effect.score, unit))
    return ", ".join(parts)
