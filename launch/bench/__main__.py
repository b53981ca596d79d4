"""`python -m phalanx.launch.bench`: as the console script `cluster-bench`."""

import sys

from .cli import main

sys.exit(main())
