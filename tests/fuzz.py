"""Generated cases against the oracle, as many as wanted: ``python -m tests.fuzz --cases N``.

A failure is made as small as it goes, and printed as a program of five lines.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.net.cases import CALLS, Case, cases
from tests.net.checks import check

ON_CPUS = ("auto", "cpu", "chunked", "reference")
WITHOUT_REFERENCE = ON_CPUS[:3]  # which takes no shards, and is no one graph
ON_GPUS = ("auto", "triton", "chunked", "reference")
BLOCK = 500  # cases that share a seed of hypothesis
OF_PROBLEM = ("seed", "settings", "lengths", "outputs")  # too many values to pair
REPRO = """\
# python -c "$(cat this)", with the same sources
from tests.net.cases import Case
from tests.net.checks import check
case = {case!r}
check(case)"""


class Coverage:
    """Which values of two options have been met together."""

    def __init__(self) -> None:
        self.cases = 0
        self.pairs: Counter[tuple[str, str]] = Counter()

    def add(self, case: Case) -> None:
        self.cases += 1
        self.pairs.update(itertools.combinations(_options(case), 2))

    def __str__(self) -> str:
        thin = sum(count < 5 for count in self.pairs.values())
        return f"{self.cases} cases, {len(self.pairs)} pairs of options, {thin} of them in under 5"


def _options(case: Case) -> Iterator[str]:
    for field in fields(Case):
        if field.name not in OF_PROBLEM:
            yield f"{field.name}={getattr(case, field.name)!r}"
    for name in sorted(case.settings):
        yield f"{name}={case.settings[name]!r}"


def find(number: int, count: int, of: st.SearchStrategy[Case], seen: Coverage) -> str:
    """Check ``count`` cases of a seed; return what to print of a failure, or nothing."""
    failed: list[Case] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(of)
    def every(case: Case) -> None:
        if not failed:
            seen.add(case)
        try:
            check(case)
        except Exception:
            failed.append(case)
            raise

    try:
        every()
    except Exception as error:  # whatever a case ends with is a finding
        # the last one that failed is the smallest
        return f"{type(error).__name__}: {error}\n{REPRO.format(case=failed[-1])}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help=f"of the first {BLOCK} cases")
    parser.add_argument("--backend", help="names, by commas; by default all that run on the device")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", help=f"of {', '.join(CALLS)}, by commas; by default all")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2), help="of each case")
    parser.add_argument("--stop", type=int, default=1000, help="after so many seeds that failed")
    parser.add_argument("--compiled", action="store_true", help="each also by torch.compile")
    args = parser.parse_args()
    several = ON_CPUS if args.device == "cpu" else ON_GPUS
    if args.ranks > 1 or args.compiled:
        several = tuple(name for name in several if name != "reference")
    of = cases(
        tuple(args.backend.split(",")) if args.backend else several,
        ranks=args.ranks,
        compiled=args.compiled,
        device=args.device,
        kinds=tuple(args.calls.split(",")) if args.calls else CALLS,
    )
    warnings.simplefilter("ignore")
    seen, findings, start = Coverage(), 0, time.monotonic()
    for block, done in enumerate(range(0, args.cases, BLOCK)):
        number, count = args.seed + block, min(BLOCK, args.cases - done)
        failure = find(number, count, of, seen)
        if failure:
            findings += 1
            print(f"\n--- --seed {number}\n{failure}\n", flush=True)
        if findings >= args.stop:
            break
        print(f"seed {number}: {seen}, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{findings} seeds with a failure")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
