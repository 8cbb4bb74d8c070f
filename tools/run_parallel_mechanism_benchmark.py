"""The multi-rank benchmark by path: `torchrun ... tools/run_parallel_mechanism_benchmark.py --mode cp_attention ...`.

The same as `python -m ringspan.bench` with the installed package; docs/benchmark.md describes it.
"""

import sys

from ringspan.bench import main

if __name__ == "__main__":
    sys.exit(main())
