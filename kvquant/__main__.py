"""`python -m kvquant`, as launchers of several processes start it."""

import sys

from kvquant.cli import main

sys.exit(main())
