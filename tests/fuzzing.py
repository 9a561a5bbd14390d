"""A mutation fuzzer: good input, damaged at random by a seed that is printed."""

import os
import random
import time
from collections.abc import Callable, Sequence

SEED = int(os.environ.get("CCFA_FUZZ_SEED", "1993"))


def mutated(content: bytes, source: random.Random) -> bytes:
    """The content with one to four injuries: bits flipped, parts cut, zeroed, doubled or random."""
    damaged = bytearray(content)
    for _ in range(source.randint(1, 4)):
        start, end = sorted(source.randrange(len(damaged) + 1) for _ in range(2))
        match source.randrange(5):
            case 0 if damaged:
                damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
            case 1:
                del damaged[start:end]
            case 2:
                damaged[start:start] = damaged[start : min(end, start + 4096)]
            case 3:
                damaged[start:end] = source.randbytes(min(end - start, 64))
            case _:
                damaged[start:end] = bytes(end - start)
    return bytes(damaged)


def fuzz(seeds: Sequence[bytes], check: Callable[[bytes], None], seconds: float, longest: float = 5.0) -> int:
    """Call `check` on mutations for so long; what it raises or how long it takes is blamed on seed and case."""
    source = random.Random(SEED)
    ends, case = time.monotonic() + seconds, 0
    print(f"CCFA_FUZZ_SEED={SEED}")
    while time.monotonic() < ends:
        content = mutated(source.choice(seeds), source)
        began = time.monotonic()
        try:
            check(content)
        except Exception as error:
            raise AssertionError(f"CCFA_FUZZ_SEED={SEED}, case {case}: {error!r} on {content[:200]!r}") from error
        took = time.monotonic() - began
        assert took < longest, f"CCFA_FUZZ_SEED={SEED}, case {case}: took {took:.1f} s"
        case += 1
    print(f"{case} cases")
    return case
