"""`python -m ringspan.report`."""

import sys

from ringspan.report import main

if __name__ == "__main__":
    sys.exit(main())
