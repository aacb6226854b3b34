"""Numbers as people write them: bytes, seconds, counts."""


def in_bytes(count: float) -> str:
    """Return ``1.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def in_seconds(seconds: float) -> str:
    """Return ``310 us``, ``41 ms``, ``3.2 s``, ``4 min 10 s`` or ``2 h 05 min``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def in_short(number: float) -> str:
    """Return ``12.3 k``, ``4.5 M``, ``7.0 G``; small numbers to four digits."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            return f"{number / (1e3 if letter == 'k' else size):.3g} {letter}"
    return f"{number:.4g}"
