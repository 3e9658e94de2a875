"""`python -m kvquant`."""

import sys

from kvquant.cli import main

sys.exit(main())
