"""Numbers for people, and the words of strangers."""

import re

UNITS = ("B", "kB", "MB", "GB", "TB")


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


def size(count: float) -> str:
    """A number of bytes for people: 1234567 is 1.23 MB."""
    unit = 0
    while count >= 999.5 and unit < len(UNITS) - 1:  # what three digits would show as 1000
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {UNITS[unit]}" if unit else f"{count:.0f} B"


def bytes_in(text: str) -> int | None:
    """The reverse: 10MB, 1.5 GB or 300; None where it is no such number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)B?", text.strip())
    if found is None:
        return None
    return round(float(found[1]) * 1000 ** ("", "k", "M", "G", "T").index(found[2].replace("K", "k")))


def duration(seconds: float) -> str:
    """A time for people: 75 is 1:15."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plain(text: str, most: int = 300) -> str:
    """What a stranger wrote, fit for a log, a terminal and a file: one line, no control characters, not too long."""
    shown = "".join(character if character.isprintable() else " " for character in text[: 4 * most])
    line = " ".join(shown.split())
    return line if len(line) <= most else f"{line[:most]}…"
