"""The table of `bench`, in 80 columns."""

from collections.abc import Mapping
from typing import Any

NAME = 31


def table(record: Mapping[str, Any]) -> list[str]:
    """What was timed and on what, a line per row, then ratios, sums, predictions, comparisons."""
    lines = [
        f"{record['model']} ({record['weights']}), {record['width_px']}x{record['height_px']}, "
        f"{record['frames']} frames, {record['tokens']} tokens",
        f"{record['chip']} ({record['device']}), mesh {record['mesh']}, {record['dtype']}, "
        f"attention by {record['dense_kernel']}",
        ", ".join(f"{name} {one}" for name, one in record["versions"].items()),
        f"{record['measured_at']}, wall clock, warm, stages interleaved; compiling apart",
        "",
        *_rows(record["rows"]),
        *_ratios(record.get("ratios", {})),
        *_sums(record.get("run_s", {}), record["steps"]),
        *_predicted(record.get("predicted")),
        *_against(record.get("against")),
    ]
    return [line[:80].rstrip() for line in lines]


def _title(name: str) -> str:
    return name.replace("_", " ")


def _rows(rows: Mapping[str, Any]) -> list[str]:
    peak = any("utilisation" in row for row in rows.values())
    head = f"{'ms':<{NAME}}{'median':>10}{'least':>10}{'most':>10}{'n':>4}{'compile s':>10}"
    lines = [head + (" peak" if peak else "")]
    for name, row in rows.items():
        times = "".join(f"{row[key]:>10,.2f}" for key in ("median_ms", "least_ms", "most_ms"))
        compiled = f"{row['compile_s']:.1f}" if "compile_s" in row else ""
        line = f"{_title(name):<{NAME}}{times}{row['n']:>4}{compiled:>9}"
        line += "*" if row.get("cached") else " "
        lines.append(line + (f"{row['utilisation']:>5.0%}" if "utilisation" in row else ""))
    if any(row.get("cached") for row in rows.values()):
        lines.append("* found in the cache of compiled programs")
    return lines


def _ratios(ratios: Mapping[str, Any]) -> list[str]:
    lines = ["", "of the dense one, round by round"] if ratios else []
    for name, one in ratios.items():
        spread = f"{one['least']:.2f} to {one['most']:.2f}"
        lines.append(f"{_title(name):<{NAME}}{one['median']:>10.2f}   {spread}, n {one['n']}")
    return lines


def _sums(sums: Mapping[str, float], steps: int) -> list[str]:
    lines = ["", f"a run of {steps} steps: medians added up; loading, compiling, MP4 left out"]
    lines += [f"{_title(name):<{NAME}}{seconds:>10,.2f} s" for name, seconds in sums.items()]
    return lines if sums else []


def _predicted(found: Mapping[str, Any] | None) -> list[str]:
    if not found:
        return []
    lines = [
        "",
        f"predicted: {found['model']}, {found['tokens']} tokens, {found['tpu']}, "
        f"mesh {found['mesh']}",
        f"({found['label']})",
    ]
    for name, ms in found["rows_ms"].items():
        lines.append(f"{'predicted ' + _title(name):<{NAME}}{ms:>10,.2f}")
    return lines


def _against(found: Mapping[str, Any] | None) -> list[str]:
    if not found:
        return []
    lines = ["", f"against {found['file']}: ratio of medians, here to there"]
    for name, one in found["rows"].items():
        flag = "within the spread" if one["verdict"] == "same" else one["verdict"].upper()
        lines.append(f"{_title(name):<{NAME}}{one['ratio']:>10.2f}   {flag}")
    return lines
