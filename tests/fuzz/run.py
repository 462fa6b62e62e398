"""Runs many programs, one seed each: ``python tests/fuzz/run.py --level joint --programs 20000 --state joint.jsonl``.

What is done is in the state file, one line for every hundred seeds with the versions they ran on; a run that was stopped goes on from
there, and seeds that ran on another product or torch run again. Failures are shrunk and written to ``tests/fuzz/corpus``. Programs run in
forked processes: one that kills its process, or does not end, has failed, or is discarded if eager mode or torch's own AOTAutograd do so.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

BLOCK = 100


def main() -> int:
    from forks import end_on_sigterm
    from shards import shard

    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--level", choices=("joint", "compile"), required=True)
    parser.add_argument("--programs", type=int, default=1000, help="number of seeds")
    parser.add_argument("--seed-from", type=int, default=0, help="the first seed")
    parser.add_argument("--state", type=Path, help="JSON-lines file of the blocks that are done; without it nothing is remembered")
    parser.add_argument("--shard", type=shard, default="1/1", help="i/n: only every n-th block of seeds, from the i-th on")
    parser.add_argument("--only", type=int, help="one seed, with its program and what it says")
    parser.add_argument("--no-shrink", action="store_true", help="failures are counted, and not written to the corpus")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="dyngran-fuzz-")
    os.environ["DYNGRAN_CACHE_DIR"] = folder  # plans of another version would hide changes
    try:
        from campaign import Campaign, show_seed
        from isolation import preload

        preload()
        if args.only is not None:
            faulthandler.enable()  # says where a process was killed
            return show_seed(args.level, args.only)
        campaign = Campaign(args.level, args.state, shrinks=not args.no_shrink)
        part, parts = args.shard
        blocks = range(args.seed_from, args.seed_from + args.programs, BLOCK)
        for number, first in enumerate(blocks):
            end = min(first + BLOCK, args.seed_from + args.programs)
            if number % parts == part - 1 and not campaign.is_done(first, end):
                campaign.run_block(first, end)
        return campaign.summary()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
