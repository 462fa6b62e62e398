"""Parts of long runs, for command lines."""

from __future__ import annotations

import argparse


def shard(text: str) -> tuple[int, int]:
    """``2/4``, the second of four parts, as a type for argparse."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part of a whole: 2/4 is the second of four")
    return int(part), int(parts)
