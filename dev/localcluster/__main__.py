"""`PYTHONPATH=dev python3 -m localcluster ...`: the same as dev/cluster.py."""

import sys

from localcluster.cli import main

sys.exit(main(sys.argv[1:]))
