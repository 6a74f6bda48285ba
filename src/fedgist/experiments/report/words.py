"""Numbers for people."""


def percent(value: float) -> str:
    """0.91234 is 91.23 %."""
    return f"{100 * value:.2f} %"


def short(count: float) -> str:
    """1234567 is 1.23 million."""
    for name, unit in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f}"


def times(ratio: float | None) -> str:
    """2.345 is 2.35×; a dash where there is no ratio."""
    return "–" if ratio is None else f"{ratio:.3g}×"
