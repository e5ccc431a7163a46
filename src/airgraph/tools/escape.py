"""Text from files, safe to be printed."""


def printable(text: str) -> str:
    """The text with everything escaped that a terminal would act on: names in a file may hold anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
