"""`python -m ringspan.fit`."""

import sys

from ringspan.fit.main import main

# Processes that multiprocessing spawns import this file under another name.
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
