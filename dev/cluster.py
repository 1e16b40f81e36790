"""Entry point of the local cluster tool: `python3 dev/cluster.py up`.

Called by the Makefile and by people.
"""

import sys

from localcluster.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
