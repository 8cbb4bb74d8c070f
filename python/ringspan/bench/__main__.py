"""`python -m ringspan.bench`."""

import sys

from ringspan.bench import main

if __name__ == "__main__":
    sys.exit(main())
